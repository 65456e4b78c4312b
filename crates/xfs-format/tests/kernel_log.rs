//! Logs that the kernel wrote, read and written again.
//!
//! Each volume is made, changed, shut down as by a crash, and its log read from the image.

mod volume;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use offshoot_machine::run::{run, try_run};
use offshoot_xfs_format::log::ends::{self, read_record};
use offshoot_xfs_format::log::items::{
    CORE_SIZE, XfsBufferFlags, XfsBufferType, XfsInodeFields, XfsInodeItem, core_for_log,
};
use offshoot_xfs_format::log::op::{self, XfsOpFlags, XfsOpWriter, XfsTransactionHeader};
use offshoot_xfs_format::log::record::{XfsLogChecksum, padded_len};
use offshoot_xfs_format::log::{
    XfsCheckpoint, XfsCheckpoints, XfsLogEnds, XfsLogItem, XfsLogRecord, XfsLogRing, XfsLogVector,
};
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{Ino, Lsn, Malformed, XfsGeometry};
use std::sync::atomic::{AtomicBool, Ordering};
use tempfile::TempDir;
use uuid::Uuid;

/// A volume in an image of its own.
struct LogVolume {
    dir: TempDir,
    geometry: XfsGeometry,
    uuid: Uuid,
    unit: usize,
}

/// A mount that ends with the value.
struct LoggingMount(PathBuf);

impl Drop for LoggingMount {
    fn drop(&mut self) {
        let _ = offshoot_testkit::loops::unmount_when_free(&self.0);
    }
}

impl LogVolume {
    /// A volume of 64 MiB with a log of 12, or `None` when this machine cannot judge.
    fn make(options: &[&str]) -> Option<Self> {
        if !volume::has_judges() {
            return None;
        }
        let dir = tempfile::tempdir().expect("a directory");
        let image = dir.path().join("image");
        let file = std::fs::File::create(&image).expect("an image");
        file.set_len(64 << 20).expect("its size");
        let mut args = vec!["-q", "--unsupported"];
        args.extend(options);
        args.push(image.to_str().expect("its path"));
        run("mkfs.xfs", &args);
        let XfsSuperblock { fields, geometry } = volume::superblock(&image);
        let (uuid, unit) = (Uuid::from_bytes(fields.uuid), fields.log_unit());
        Some(Self { dir, geometry, uuid, unit })
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn mount(&self, options: &str) -> LoggingMount {
        self.try_mount(options).unwrap_or_else(|reason| panic!("{reason}"))
    }

    fn try_mount(&self, options: &str) -> Result<LoggingMount, String> {
        let place = self.dir.path().join("mount");
        std::fs::create_dir_all(&place).expect("a place to mount at");
        let options = format!("loop{options}");
        let args = [Path::new("-o"), Path::new(&options), &self.image(), &place];
        try_run("mount", &[&[Path::new("-t"), Path::new("xfs")], &args[..]].concat())?;
        Ok(LoggingMount(place))
    }

    /// Runs `script` in the mounted volume, and shuts it down as by a crash with its log forced.
    fn crash_after(&self, options: &str, script: &str) {
        let mounted = self.mount(options);
        run("sh", &["-e", "-c", &format!("cd {} && {{ {script}\n}}", mounted.0.display())]);
        run("xfs_io", &["-x", "-c", "shutdown -f", mounted.0.to_str().expect("its path")]);
    }

    fn ring(&self) -> XfsLogRing {
        XfsLogRing::of(&self.geometry).expect("a log")
    }

    fn log(&self) -> Vec<u8> {
        let start = self.geometry.place_of(self.geometry.log_start).expect("a place").bytes();
        let image = std::fs::read(self.image()).expect("the image");
        let start = usize::try_from(start).expect("small");
        image[start..][..self.ring().blocks() as usize * 512].to_vec()
    }

    fn ends(&self, log: &[u8]) -> Result<XfsLogEnds, Malformed> {
        ends::find(self.ring(), self.uuid, &mut reader(log))
    }
}

fn xfs_db(image: &Path, field: &str) -> String {
    let print = format!("print {field}");
    let image = image.to_str().expect("its path");
    let printed = run("xfs_db", &["-r", "-c", "sb 0", "-c", &print, image]);
    printed.trim().rsplit(' ').next().unwrap_or_default().to_owned()
}

fn reader(log: &[u8]) -> impl FnMut(u32, &mut [u8]) -> Result<(), Malformed> {
    |block, buffer| {
        buffer.copy_from_slice(&log[block as usize * 512..][..buffer.len()]);
        Ok(())
    }
}

/// The records from tail to head, each with its unpacked body.
fn records(ring: XfsLogRing, log: &[u8], ends: &XfsLogEnds) -> Vec<(XfsLogRecord, Vec<u8>)> {
    let (mut at, mut records, mut buffer) = (ends.tail, Vec::new(), Vec::new());
    while at != ends.head {
        let read = read_record(ring, at, &mut reader(log), &mut buffer).expect("no I/O");
        let (record, checksum) = read.expect("a record");
        assert_eq!(checksum, XfsLogChecksum::Right, "{at}");
        let mut packed = buffer.clone();
        let body = record.unpack(&mut buffer).expect("it is whole").to_vec();
        let headers = record.header_blocks() as usize * 512;
        let mut again = vec![0xee; headers];
        again.extend_from_slice(&body);
        record.seal(ring, &mut again).expect("it fits");
        let sealed = record.checksum(&again).expect("it is whole");
        assert_eq!(sealed, XfsLogChecksum::Right);
        // The kernel leaves old words in those further headers that the body does not fill.
        let words = body.len() / 512;
        if headers > 512 && words < headers / 512 * 64 {
            for word in words.max(64)..headers / 512 * 64 {
                packed[word / 64 * 512 + 4 + word % 64 * 4..][..4].fill(0);
            }
            again[32..36].copy_from_slice(&packed[32..36]);
        }
        assert!(again == packed, "the record at {at} is sealed to other bytes");
        at = ring.advance(at, record.block_count());
        records.push((record, body));
    }
    records
}

/// The transactions of the log. Every op and every item is written again to the same bytes.
fn checkpoints(volume: &LogVolume, log: &[u8], ends: &XfsLogEnds) -> Vec<XfsCheckpoint> {
    let mut open = XfsCheckpoints::new(volume.ring());
    let mut whole = Vec::new();
    for (record, body) in records(volume.ring(), log, ends) {
        let mut again = vec![0; body.len()];
        let mut writer = XfsOpWriter::new(&mut again, 0, 0);
        for op in op::ops(&body, record.ops) {
            let op = op.expect("an op");
            let is_written = match op.flags {
                XfsOpFlags::START => writer.start(op.tid),
                XfsOpFlags::COMMIT => writer.commit(op.tid),
                XfsOpFlags::UNMOUNT => writer.unmount(op.tid),
                flags => {
                    // What a piece continues and what follows it, any bytes do.
                    let mut region = Vec::new();
                    if flags.contains(XfsOpFlags::CONTINUED) {
                        region.resize(8, 0);
                    }
                    let done = region.len();
                    region.extend_from_slice(op.data);
                    if flags.contains(XfsOpFlags::CONTINUES) {
                        region.resize(done + body.len(), 0);
                    }
                    writer.region(op.tid, &region, done) == done + op.data.len()
                }
            };
            assert!(is_written, "{op:?}");
            whole.extend(open.add(record.lsn, &op).expect("a transaction"));
        }
        assert_eq!(writer.count(), record.ops);
        assert_eq!(padded_len(writer.used(), record.header_blocks(), volume.unit), body.len());
        // Behind the ops the kernel leaves what its buffer held before.
        let used = writer.used();
        assert!(again[..used] == body[..used], "other ops at {}", record.lsn);
    }
    for checkpoint in &whole {
        let mut again = XfsLogVector::default();
        for regions in checkpoint.items() {
            let item = XfsLogItem::parse(regions).expect("an item");
            item.check(&volume.geometry).expect("it leads to where it may");
            assert!(item.encode(&mut again));
        }
        assert!(again.regions() == checkpoint.regions(), "{:#x}", checkpoint.tid);
    }
    whole
}

/// The transactions and the lengths of all regions, an item a line, as `xfs_logprint -t` has them.
fn shown(checkpoints: &[XfsCheckpoint]) -> String {
    let mut text = String::new();
    for checkpoint in checkpoints {
        let _ = write!(text, "tid:{:#x}", checkpoint.tid);
        for regions in checkpoint.items() {
            text.push('\n');
            for region in regions.iter() {
                let _ = write!(text, " len:{}", region.len());
            }
            match XfsLogItem::parse(regions).expect("an item") {
                XfsLogItem::Buffer(item) => {
                    let (blocks, flags) = (item.blocks, item.flags.bits());
                    let _ = write!(text, " blkno:{:#x} len:{blocks}", item.place.0);
                    let _ = write!(text, " flags:{flags:#x}");
                }
                XfsLogItem::Inode(item) => {
                    let _ = write!(text, " ino:{:#x} flags:{:#x}", item.ino.0, item.fields.bits());
                }
                _ => {}
            }
        }
        text.push('\n');
    }
    text
}

/// What `xfs_logprint -t` prints, in the form of [`shown`].
fn printed(output: &str) -> String {
    let mut text = String::new();
    let mut last = "";
    for line in output.lines() {
        let words = |names: &[&str]| {
            line.split_whitespace()
                .filter(|word| names.iter().any(|name| word.starts_with(name)))
                .fold(String::new(), |text, word| text + " " + word)
        };
        let is_item = line.split_once(": cnt:").is_some_and(|(name, _)| !name.contains(' '));
        if line.starts_with("TRANS:") {
            if !text.is_empty() {
                text.push('\n');
            }
            let tid = words(&["tid:"]);
            text.push_str(tid.trim());
        } else if is_item {
            text.push('\n');
            text.push_str(&words(&["len:"]));
        } else if last.contains(": cnt:") && line.contains(" #regs:") {
            text.push_str(&words(&["blkno:", "len:", "ino:", "flags:"]));
        }
        last = line;
    }
    text + "\n"
}

/// Compares head, tail and all regions of a dirty log with what `xfs_logprint` prints.
fn judge(volume: &LogVolume) -> Vec<XfsCheckpoint> {
    let (log, image) = (volume.log(), volume.image());
    let ends = volume.ends(&log).expect("a log");
    let whole = checkpoints(volume, &log, &ends);
    let args = ["-t", image.to_str().expect("its path")];
    let output = match try_run("xfs_logprint", &args) {
        Ok(output) => output,
        // `xfs_logprint` 6.1 cannot read a record whose headers go over the end of the ring.
        Err(problem) if problem.contains("Invalid block length") => return whole,
        Err(problem) => panic!("{}", &problem[problem.len().saturating_sub(300)..]),
    };
    let (tail, head) = (ends.tail.block(), ends.head.block());
    let line = format!("log tail: {tail} head: {head} state: <DIRTY>");
    assert!(output.contains(&line), "{line} expected in {}", &output[..300]);
    let (ours, theirs) = (shown(&whole), printed(&output));
    let differing = ours.lines().zip(theirs.lines()).find(|(ours, theirs)| ours != theirs);
    assert_eq!(differing, None);
    assert_eq!(ours.lines().count(), theirs.lines().count());
    whole
}

/// Files, directories of all forms, links, attributes, clones, holes, removals.
const WORK: &str = r"
    for i in $(seq 300); do echo hi > f$i; done
    mkdir d
    for i in $(seq 50); do mkdir d/$i; ln -s $(printf 'x%.0s' $(seq 900)) d/s$i; done
    xfs_io -f -c 'pwrite -q 0 256k' a; cp --reflink=always a b; xfs_io -c 'pwrite -q 8k 4k' b
    xfs_io -f -c 'falloc 0 1m' -c 'pwrite -q 64k 64k' -c 'fpunch 4k 8k' c
    xfs_io -c fsync a
    mknod node b 8 1; mkfifo fifo; truncate -s 0 f10; mv f11 d/; ln f12 f12b; rm f[4-9]
    xfs_io -f -c 'chattr +s' t; rm -r d/1*
";

#[test]
fn logs_of_all_kinds_of_changes_are_read_and_written_again() {
    for options in [
        &["-m", "rmapbt=1", "-i", "nrext64=1"][..],
        &["-m", "bigtime=0", "-l", "su=4096", "-i", "nrext64=0"],
        &["-s", "size=4096"],
        &["-b", "size=1024", "-n", "size=8192"],
    ] {
        let Some(volume) = LogVolume::make(options) else { return };
        let clean = volume.ends(&volume.log()).expect("a log");
        assert!(clean.is_clean && clean.head == clean.tail, "{clean:?}");
        volume.crash_after("", WORK);
        let whole = judge(&volume);
        replayed_as_the_kernel_does(&volume, &whole);
    }
}

/// A directory block of 64 KiB is logged whole, so its region has pieces in three records.
#[test]
fn a_region_longer_than_a_record_is_put_together() {
    let Some(volume) = LogVolume::make(&["-n", "size=65536"]) else { return };
    let script = "for i in $(seq 3500); do : > a_rather_long_name_of_a_file_$i; done";
    volume.crash_after(",logbsize=32k", script);
    let log = volume.log();
    let records = records(volume.ring(), &log, &volume.ends(&log).expect("a log"));
    let middle = XfsOpFlags::CONTINUED | XfsOpFlags::CONTINUES;
    let ops = records.iter().flat_map(|(record, body)| op::ops(body, record.ops));
    assert!(ops.flatten().any(|op| op.flags == middle));
    judge(&volume);
}

/// Logs of other versions and of other tools, which are clean.
#[test]
fn logs_that_xfsprogs_made_are_clean() {
    for (options, version, head) in [
        (&["-m", "crc=0", "-l", "version=1"][..], 1, Lsn::new(1, 2)),
        (&["-m", "crc=0"], 2, Lsn::new(1, 2)),
        (&["-l", "su=64k"], 2, Lsn::new(1, 128)),
    ] {
        let Some(volume) = LogVolume::make(options) else { return };
        let ends = volume.ends(&volume.log()).expect("a log");
        let last = ends.last.as_ref().map(|last| last.version);
        assert_eq!((ends.is_clean, ends.head, last), (true, head, Some(version)));
        let image = volume.image();
        let image = image.to_str().expect("its path");
        run("xfs_db", &["-x", "-c", "logformat -c 9", image]);
        let ends = volume.ends(&volume.log()).expect("a log");
        assert_eq!((ends.is_clean, ends.tail.cycle()), (true, 9), "{ends:?}");
        run("xfs_repair", &["-L", "-f", image]);
        let ends = volume.ends(&volume.log()).expect("a log");
        assert!(ends.is_clean, "{ends:?}");
    }
}

/// Lets the kernel recover the log, and compares what we would replay with what is on disk then:
/// all inodes with links, and what was logged last of directories and links.
fn replayed_as_the_kernel_does(volume: &LogVolume, whole: &[XfsCheckpoint]) {
    drop(volume.mount(",noatime"));
    let image = std::fs::read(volume.image()).expect("the image");
    let mut inodes: BTreeMap<_, XfsInodeItem<'_>> = BTreeMap::new();
    let mut chunks = BTreeMap::new();
    let items = whole.iter().flat_map(|checkpoint| checkpoint.items().zip(0..));
    for (regions, _) in items {
        match XfsLogItem::parse(regions).expect("an item") {
            XfsLogItem::Inode(item) => {
                inodes.insert(item.ino, item);
            }
            XfsLogItem::Buffer(item) => {
                let start = item.place.bytes();
                if item.flags.contains(XfsBufferFlags::CANCEL) {
                    let end = start + u64::from(item.blocks) * 512;
                    chunks.retain(|at, _| !(start..end).contains(at));
                    inodes.retain(|_, item| !(start..end).contains(&item.place.bytes()));
                }
                let is_compared = matches!(
                    item.flags.block_type(),
                    Some(
                        XfsBufferType::DirectoryBlock
                            | XfsBufferType::DirectoryData
                            | XfsBufferType::DirectoryLeaf
                            | XfsBufferType::DirectoryLeafOfNode
                            | XfsBufferType::Symlink
                    )
                );
                for run in item.runs().filter(|_| is_compared) {
                    for (chunk, at) in run.data.chunks(128).zip((run.offset..).step_by(128)) {
                        chunks.insert(start + at as u64, chunk);
                    }
                }
            }
            _ => {}
        }
    }
    assert!(inodes.len() > 20 && chunks.len() > 10, "{} {}", inodes.len(), chunks.len());
    let differs = |at: u64, new: &[u8], spared: &[std::ops::Range<usize>]| {
        let old = &image[usize::try_from(at).expect("small")..][..new.len()];
        let mut bytes = old.iter().zip(new).enumerate();
        bytes.find_map(|(index, (old, new))| {
            let is_spared = spared.iter().any(|range| range.contains(&index));
            (old != new && !is_spared).then_some(index)
        })
    };
    for item in inodes.values() {
        let at = item.place.bytes() + u64::from(item.offset);
        let mut core = [0xff; CORE_SIZE];
        item.put_core(&mut core).expect("it is long enough");
        // The checksum and the LSN are those of the recovery.
        let is_unlinked = core[16..20] == [0; 4];
        let problem = differs(at, &core, &[100..104, 112..120]).filter(|_| !is_unlinked);
        assert_eq!(problem, None, "core of {}: {core:x?}", item.ino);
        if let Some(data) = item.data.filter(|_| !item.fields.contains(XfsInodeFields::DATA_ROOT)) {
            if is_unlinked {
                continue;
            }
            assert_eq!(differs(at + 176, data, &[]), None, "data of {}", item.ino);
        }
        let log_core = core_for_log(&core);
        assert!(log_core == item.core, "the core of {} for the log", item.ino);
    }
    // The start of a block has its LSN and its checksum.
    let is_header = |at: u64| at.is_multiple_of(volume.geometry.block_size() as u64);
    for (&at, chunk) in chunks.iter().filter(|&(&at, _)| !is_header(at)) {
        assert_eq!(differs(at, chunk, &[]), None, "the chunk at {at}");
    }
}

/// Changes enough for a log of 13 MiB to be written around.
fn write_around(place: &Path) {
    for round in 0..6 {
        for dir in 0..20 {
            let dir = place.join(format!("d{dir}"));
            std::fs::create_dir(&dir).expect("a directory");
            for name in 0..500 {
                std::fs::File::create(dir.join(format!("{name}"))).expect("a file");
            }
            std::fs::File::open(&dir).expect("it is there").sync_all().expect("a sync");
        }
        for dir in 1..20 {
            std::fs::remove_dir_all(place.join(format!("d{dir}"))).expect("it is there");
        }
        std::fs::rename(place.join("d0"), place.join(format!("kept{round}")))
            .expect("another name");
    }
}

#[test]
fn a_log_that_was_written_around_is_read_with_buffers_of_each_size() {
    for options in [",logbsize=16k", ",logbsize=32k", ",logbsize=256k"] {
        let Some(volume) = LogVolume::make(&["-m", "rmapbt=1", "-l", "size=13m"]) else { return };
        {
            let mounted = volume.mount(options);
            write_around(&mounted.0);
            shut_down(&mounted.0);
        }
        let log = volume.log();
        let ends = volume.ends(&log).expect("a log");
        assert!(ends.head.cycle() > 1, "{ends:?}");
        judge(&volume);
        damage_is_told_from_a_crash(&volume, &log, &ends);
    }
}

fn shut_down(place: &Path) {
    run("xfs_io", &["-x", "-c", "shutdown -f", place.to_str().expect("its path")]);
}

/// Damage in the records that were in flight ends the log before them. Earlier damage is an error.
fn damage_is_told_from_a_crash(volume: &LogVolume, log: &[u8], ends: &XfsLogEnds) {
    let ring = volume.ring();
    let records: Vec<_> = records(ring, log, ends).into_iter().map(|(record, _)| record).collect();
    assert!(records.len() > 13, "{}", records.len());
    let after = |back: usize, blocks: &[u32], change: &dyn Fn(&mut [u8])| {
        let record = &records[records.len() - back];
        let mut log = log.to_vec();
        for &block in blocks {
            let at = ring.advance(record.lsn, block).block() as usize * 512;
            change(&mut log[at..][..512]);
        }
        (record.lsn, volume.ends(&log))
    };
    let headers = records[0].header_blocks();
    let old = |block: &mut [u8]| block[3] = block[3].wrapping_sub(1);
    for back in 1..=8 {
        let flip = |block: &mut [u8]| block[77] ^= 4;
        let (lsn, found) = after(back, &[headers], &flip);
        let found = found.expect("a log");
        assert_eq!((found.head, found.is_torn), (lsn, true), "flipped, {back} from the end");
        // A block that was not written has the older cycle in its first word.
        let (lsn, found) = after(back, &[1], &old);
        assert_eq!(found.expect("a log").head, lsn, "block missing, {back} from the end");
        let (lsn, found) = after(back, &[0], &|block| {
            block.fill(0);
            let cycle = records[records.len() - back].lsn.cycle() - 1;
            block[..4].copy_from_slice(&cycle.to_be_bytes());
        });
        assert_eq!(found.expect("a log").head, lsn, "header missing, {back} from the end");
    }
    let (lsn, found) = after(12, &[headers], &|block| block[77] ^= 4);
    let found = found.expect_err("no crash does that");
    assert!(found.problem.contains(&lsn.to_string()), "{found}");
}

#[test]
fn intents_of_a_cut_chain_are_read() {
    let Some(volume) = LogVolume::make(&["-m", "rmapbt=1"]) else { return };
    {
        let mounted = volume.mount("");
        let file = |name: &str| std::fs::File::create(mounted.0.join(name)).expect("a file");
        let frag = file("fragments");
        for index in 0..3000 {
            frag.write_all_at(&[1; 4096], index * 8192).expect("room");
        }
        frag.sync_all().expect("a sync");
        let frag = mounted.0.join("fragments");
        let args = ["--reflink=always", frag.to_str().expect("a path")];
        let other = file("other");
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let rounds = (0..100_000).take_while(|_| !is_done.load(Ordering::Relaxed));
                for round in rounds {
                    other.set_len(round).expect("it grows");
                    other.sync_all().expect("a sync");
                }
            });
            let clone = mounted.0.join("clone");
            run("cp", &[args[0], args[1], clone.to_str().expect("a path")]);
            std::fs::File::options().write(true).open(&frag).expect("it").set_len(0).expect("less");
            std::fs::remove_file(&clone).expect("it is there");
            is_done.store(true, Ordering::Relaxed);
        });
        shut_down(&mounted.0);
    }
    let whole = judge(&volume);
    let mut kinds = BTreeMap::new();
    for regions in whole.iter().flat_map(XfsCheckpoint::items) {
        let kind = match XfsLogItem::parse(regions).expect("an item") {
            XfsLogItem::Efi(_) => "EFI",
            XfsLogItem::Efd(_) => "EFD",
            XfsLogItem::Rui(_) => "RUI",
            XfsLogItem::Cui(_) => "CUI",
            XfsLogItem::Bui(_) => "BUI",
            XfsLogItem::Done { item, .. } => item.name(),
            _ => continue,
        };
        *kinds.entry(kind).or_insert(0) += 1;
    }
    assert!(kinds.len() > 3, "{kinds:?}");
}

/// Our search takes a damaged log exactly when the kernel's does.
#[test]
fn the_kernel_agrees_on_what_a_crash_may_have_torn() {
    let Some(volume) = LogVolume::make(&["-m", "rmapbt=1", "-l", "size=13m"]) else { return };
    {
        let mounted = volume.mount(",logbsize=32k");
        write_around(&mounted.0);
        shut_down(&mounted.0);
    }
    let (ring, log) = (volume.ring(), volume.log());
    let ends = volume.ends(&log).expect("a log");
    let records = records(ring, &log, &ends);
    let whole = volume.dir.path().join("whole");
    std::fs::rename(volume.image(), &whole).expect("another name");
    let place = volume.geometry.place_of(volume.geometry.log_start).expect("a place").bytes();
    // Whether the kernel takes the log with these changes; ours is asked at the same time.
    let agree = |changes: &[(u32, Vec<u8>)]| {
        std::fs::copy(&whole, volume.image()).expect("a copy");
        let file = std::fs::File::options().write(true).open(volume.image()).expect("the image");
        for (block, bytes) in changes {
            file.write_all_at(bytes, place + u64::from(*block) * 512).expect("a block");
        }
        let ours = volume.ends(&volume.log());
        let theirs = volume.try_mount("").is_ok();
        let blocks: Vec<_> = changes.iter().map(|(block, _)| block).collect();
        assert_eq!(ours.is_ok(), theirs, "blocks {blocks:?} of {ends:?}: {ours:?}");
        // The kernel went on where it found the head.
        if let Ok(ours) = ours {
            let (log, mut buffer) = (volume.log(), Vec::new());
            let next = read_record(ring, ours.head, &mut reader(&log), &mut buffer);
            let checksum = next.expect("no I/O").map(|(_, checksum)| checksum);
            assert_eq!(checksum, Ok(XfsLogChecksum::Right), "blocks {blocks:?}: {ours:?}");
        }
        theirs
    };
    let block_of = |block: u32| log[block as usize * 512..][..512].to_vec();
    let mut taken = 0;
    for back in 1..=12 {
        let block = ring.advance(records[records.len() - back].0.lsn, 1).block();
        let mut bytes = block_of(block);
        bytes[77] ^= 4;
        taken += u32::from(agree(&[(block, bytes)]));
    }
    assert!((1..12).contains(&taken), "{taken}");
    // Blocks that were not written, or were damaged, in any order.
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u32 = seed.unwrap_or_else(std::process::id);
    println!("OFFSHOOT_SEED={seed}");
    let mut state = u64::from(seed) << 1 | 1;
    let mut random = move |below: u32| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        u32::try_from(state >> 33).expect("31 bits") % below
    };
    for _ in 0..8 {
        let reach = [8, 64, 256, 700, 1400][random(5) as usize];
        let changes: Vec<_> = (0..=random(5))
            .map(|_| {
                let at = ring.retreat(ends.head, 1 + random(reach)).expect("a place");
                let mut bytes = block_of(at.block());
                if random(4) == 0 {
                    bytes[random(512) as usize] ^= 1 << random(8);
                } else {
                    bytes.fill(0x55);
                    bytes[..4].copy_from_slice(&(at.cycle() - 1).to_be_bytes());
                }
                (at.block(), bytes)
            })
            .collect();
        agree(&changes);
    }
}

/// The kernel recovers a transaction that we wrote, its regions split over small records.
#[test]
fn the_kernel_recovers_a_log_of_ours() {
    let Some(volume) = LogVolume::make(&["-m", "rmapbt=1"]) else { return };
    let (ring, image) = (volume.ring(), volume.image());
    let ends = volume.ends(&volume.log()).expect("a log");
    let root = Ino(xfs_db(&image, "rootino").parse().expect("a number"));
    let (ag, block, index) = volume.geometry.locate(root).expect("a place");
    let place = volume.geometry.place(ag, block);
    let file = std::fs::File::options().read(true).write(true).open(&image).expect("the image");
    let mut disk = [0; CORE_SIZE];
    file.read_exact_at(&mut disk, place.bytes() + u64::from(index) * 512).expect("an inode");
    disk[8..12].copy_from_slice(&1234_u32.to_be_bytes());
    let core = core_for_log(&disk);
    let item = XfsLogItem::Inode(XfsInodeItem {
        fields: XfsInodeFields::CORE,
        ino: root,
        device: 0,
        place,
        blocks: 32,
        offset: index * 512,
        core: &core,
        data: None,
        attributes: None,
    });
    let mut vector = XfsLogVector::default();
    assert!(item.encode(&mut vector));
    let regions = vector.regions().iter().map(<[u8]>::to_vec);
    let header = XfsTransactionHeader { tid: 7, regions: 2 }.encode().to_vec();
    let mut body = vec![0; 512];
    let last = ends.last.as_ref().expect("a record").lsn;
    let (mut lsn, tail, mut previous) = (ends.head, ends.head, last.block());
    let mut write = |used: usize, ops: u32, body: &[u8]| {
        let len = padded_len(used, 1, 512);
        let record = XfsLogRecord {
            lsn,
            tail,
            version: 2,
            len: u32::try_from(len).expect("small"),
            previous: Some(previous),
            ops,
            byte_order: 1,
            uuid: volume.uuid,
            buffer: 32 << 10,
        };
        let mut blocks = vec![0; 512];
        blocks.extend_from_slice(&body[..len]);
        record.seal(ring, &mut blocks).expect("it fits");
        let log = volume.geometry.place_of(volume.geometry.log_start).expect("a place").bytes();
        file.write_all_at(&blocks, log + u64::from(lsn.block()) * 512).expect("room");
        previous = lsn.block();
        lsn = ring.advance(lsn, record.block_count());
    };
    let mut writer = XfsOpWriter::new(&mut body, 0, 0);
    assert!(writer.start(7));
    // Something that recovery passes over fills the record, so that the core is split.
    let filler = vec![0; 512 - 12 - 28 - 68 - 12 - 12 - 60];
    assert_eq!(writer.region(8, &filler, 0), filler.len());
    let mut pieces = 0;
    for region in std::iter::once(header).chain(regions) {
        let mut done = 0;
        while done < region.len() {
            let now = writer.region(7, &region, done);
            if now == done {
                let (used, ops) = (writer.used(), writer.count());
                write(used, ops, &body);
                body.fill(0);
                writer = XfsOpWriter::new(&mut body, 0, 0);
                pieces += 1;
            }
            done = now;
        }
    }
    assert!(writer.commit(7));
    let (used, ops) = (writer.used(), writer.count());
    write(used, ops, &body);
    assert_eq!(pieces, 1);
    let whole = checkpoints(&volume, &volume.log(), &volume.ends(&volume.log()).expect("a log"));
    assert_eq!(whole.len(), 1);
    {
        let mounted = volume.mount("");
        let owner = run("stat", &["-c", "%u", mounted.0.to_str().expect("its path")]);
        assert_eq!(owner.trim(), "1234");
    }
    run("xfs_repair", &["-n", "-f", image.to_str().expect("its path")]);
}
