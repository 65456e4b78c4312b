//! New volumes against `mkfs.xfs`, the kernel and `xfs_repair`.
//!
//! The bytes are those of `mkfs.xfs`, but for what it makes up: the generations of inodes, times,
//! and with them the checksums of inodes. Where it removed a record of a tree, the bytes of the
//! record are still there. It also writes no checksum into the log, where we do.

use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::run::try_run;
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, XfsDisk};
use offshoot_testkit::xfs::fill;
use offshoot_testkit::xfs::judges::{self, XfsJudges};
use offshoot_vfs::{Errno, Error, FileSystem, Timestamp};
use offshoot_xfs::{XfsMkfsFeatures, XfsMkfsOptions, XfsOptions, XfsStripe, XfsVolume, mkfs_xfs};
use offshoot_xfs_format::btree::XfsTree;
use offshoot_xfs_format::inode::INODE_CRC;
use offshoot_xfs_format::superblock::XfsSuperblock;
use offshoot_xfs_format::{AgBlock, AgNumber, Ino};
use rustix::fs::SeekFrom;
use uuid::Uuid;

const MIB: u64 = 1 << 20;

const TIME: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 123_456_789 };

fn options() -> XfsMkfsOptions {
    XfsMkfsOptions::new(Uuid::from_u128(0x0f5_1234_5678), TIME)
}

/// A volume that both programs are asked for.
#[derive(Debug)]
struct MkfsCase {
    bytes: u64,
    /// The options of `mkfs.xfs`.
    args: Vec<String>,
    ours: XfsMkfsOptions,
}

fn one_of<T: Copy>(random: &mut Random, values: &[T]) -> T {
    values[usize::try_from(random.below(values.len() as u64)).unwrap()]
}

impl MkfsCase {
    /// A volume of these bytes, with any options; some of them contradict each other.
    fn random(random: &mut Random, bytes: u64) -> Self {
        let uuid = Uuid::from_u128(1 + u128::from(random.number()));
        let ours = XfsMkfsOptions::new(uuid, TIME);
        let mut case = Self { bytes, args: Vec::new(), ours };
        case.arg("-m", format!("uuid={uuid}"));
        case.units(random);
        case.features(random);
        case.groups(random);
        case.log(random);
        if random.below(3) == 0 {
            let label = one_of(random, &["x", "boot", "twelve bytes"]);
            label.clone_into(&mut case.ours.label);
            case.ours.inode_percent = Some(33);
            case.arg("-L", label);
            case.arg("-i", "maxpct=33");
        }
        case
    }

    fn arg(&mut self, letter: &str, value: impl Into<String>) {
        self.args.extend([letter.to_owned(), value.into()]);
    }

    fn units(&mut self, random: &mut Random) {
        let block = one_of(random, &[1024, 2048, 4096, 4096, 4096, 8192, 16384, 32768, 65536]);
        let inode = one_of(random, &[512, 512, 512, 1024, 2048]);
        let sector = one_of(random, &[512, 512, 512, 1024, 4096]);
        self.ours.block_size = block;
        self.ours.inode_size = inode;
        self.ours.sector_size = Some(sector);
        self.arg("-b", format!("size={block}"));
        self.arg("-i", format!("size={inode}"));
        self.arg("-s", format!("size={sector}"));
        if random.below(3) == 0 {
            let size = one_of(random, &[4096, 8192, 65536]);
            self.ours.dir_block_size = Some(size);
            self.arg("-n", format!("size={size}"));
        }
    }

    fn features(&mut self, random: &mut Random) {
        let names = [
            ("finobt", "-m", 6),
            ("inobtcount", "-m", 3),
            ("rmapbt", "-m", 2),
            ("reflink", "-m", 2),
            ("bigtime", "-m", 2),
            ("sparse", "-i", 2),
            ("nrext64", "-i", 2),
            ("exchange", "-i", 2),
            ("parent", "-n", 2),
        ];
        for (name, letter, one_off_in) in names {
            let is_on = random.below(one_off_in) != 0;
            self.ours.features.apply(&format!("{}{name}", if is_on { "" } else { "^" })).unwrap();
            self.arg(letter, format!("{name}={}", u8::from(is_on)));
        }
    }

    fn groups(&mut self, random: &mut Random) {
        let block = self.ours.block_size;
        if random.below(3) == 0 {
            let unit = block.max(4096) * one_of(random, &[1, 1, 2, 3, 4, 5, 8, 16, 64]);
            let width = one_of(random, &[1, 2, 3, 4, 8]);
            self.ours.stripe = Some(XfsStripe { unit, width: unit * width });
            self.arg("-d", format!("su={unit},sw={width}"));
        }
        match random.below(6) {
            0 => {
                let count = one_of(random, &[1, 2, 3, 5, 8, 13, 40]);
                self.ours.group_count = Some(count);
                self.arg("-d", format!("agcount={count}"));
            }
            1 => {
                let size = (self.bytes / (1 + random.below(40))).max(16 * MIB);
                let size = size / u64::from(block) * u64::from(block);
                self.ours.group_size = Some(size);
                self.arg("-d", format!("agsize={size}"));
            }
            _ => {}
        }
    }

    fn log(&mut self, random: &mut Random) {
        let block = self.ours.block_size;
        if random.below(4) == 0 {
            let unit = one_of(random, &[block, 2 * block, 5 * block, 32768, 65536, 262_144]);
            self.ours.log_stripe = Some(unit);
            self.arg("-l", format!("su={unit}"));
        }
        let is_filled = self.ours.group_size.is_some() && random.below(2) == 0;
        if is_filled || random.below(5) == 0 {
            let mut size = 64 * MIB + random.below(64 * MIB);
            // A log that leaves hardly a block of its group.
            if let Some(group) = self.ours.group_size.filter(|group| *group > 65 * MIB) {
                size = group - u64::from(block) * random.below(24);
            }
            let size = size / u64::from(block) * u64::from(block);
            self.ours.log_size = Some(size);
            self.arg("-l", format!("size={size}"));
        }
    }

    fn disk(&self, judges: &XfsJudges) -> XfsDisk {
        let disk = XfsDisk::create(judges, 0);
        File::options().write(true).open(disk.image()).unwrap().set_len(self.bytes).unwrap();
        disk
    }

    /// Runs `mkfs.xfs` on `disk`. Returns what it says.
    fn run_theirs(
        &self,
        judges: &XfsJudges,
        disk: &XfsDisk,
        first: &[&str],
    ) -> Result<String, String> {
        let args = first.iter().copied().chain(self.args.iter().map(String::as_str));
        let args: Vec<_> = args.chain(["-f", disk.image().to_str().unwrap()]).collect();
        try_run(&judges.progs().program("mkfs.xfs"), &args)
    }

    /// The volumes of both programs; `None` when both refuse.
    fn make_both(&self, judges: &XfsJudges) -> Option<(XfsDisk, XfsDisk)> {
        let (ours, theirs) = (self.disk(judges), self.disk(judges));
        let our_answer = mkfs_xfs(&*ours.writable_device(), &self.ours);
        let their_answer = self.run_theirs(judges, &theirs, &[]);
        assert_eq!(
            our_answer.is_ok(),
            their_answer.is_ok(),
            "{self:?}\n{our_answer:?}\n{their_answer:?}"
        );
        if let Err(error) = &our_answer {
            assert!(matches!(error, Error::Posix { .. }), "{self:?}\n{error}");
        }
        our_answer.is_ok().then_some((ours, theirs))
    }
}

fn superblock(disk: &XfsDisk) -> XfsSuperblock {
    let mut sector = vec![0; 32 << 10];
    disk.device().read_at(0, &mut sector).unwrap();
    XfsSuperblock::parse(&sector).unwrap()
}

/// What `mkfs.xfs` makes up or leaves behind: places on the device, with their lengths.
fn made_up(disk: &XfsDisk) -> Vec<(u64, u64)> {
    let XfsSuperblock { fields, geometry } = superblock(disk);
    let root = fields.root().unwrap();
    let mut places = Vec::new();
    for index in 0..fields.icount.get() {
        let inode = geometry.inode_offset(Ino(root.0 + index)).unwrap();
        places.extend([(inode + INODE_GENERATION, 4), (inode + INODE_CRC as u64, 4)]);
        // The bitmap of realtime blocks has a fixed time of access.
        let times = if index == 1 { &TIMES[1..] } else { TIMES };
        if index < 3 {
            places.extend(times.iter().map(|time| (inode + time, 8)));
        }
    }
    let log = geometry.place_of(geometry.log_start).unwrap().bytes();
    places.push((log + RECORD_CRC, 4));
    let device = disk.device();
    let roots = geometry.header_blocks()..geometry.header_blocks() + 6;
    for (ag, root) in (0..geometry.ag_count).flat_map(|ag| roots.clone().map(move |at| (ag, at))) {
        let place = geometry.place(AgNumber(ag), AgBlock(root)).bytes();
        let block = contents(&*device, &[(place, place + geometry.block_size() as u64)]);
        let Some(tree) = XfsTree::of_block(&block, &geometry) else { continue };
        let records = usize::from(u16::from_be_bytes([block[6], block[7]]));
        let end = tree.header_len(&geometry) + records * tree.record_len();
        if block[end..].iter().any(|&byte| byte != 0) {
            places
                .extend([(place + LEAF_CRC, 4), (place + end as u64, (block.len() - end) as u64)]);
        }
    }
    places
}

const LEAF_CRC: u64 = 52;
const INODE_GENERATION: u64 = 92;
const TIMES: &[u64] = &[32, 40, 48, 144];
const RECORD_CRC: u64 = 32;

/// The places of a file with data, as pairs of start and end.
fn data(file: &File) -> Vec<(u64, u64)> {
    let mut places = Vec::new();
    let mut at = 0;
    while let Ok(start) = rustix::fs::seek(file, SeekFrom::Data(at)) {
        at = rustix::fs::seek(file, SeekFrom::Hole(start)).unwrap();
        places.push((start, at));
    }
    places
}

/// Checks that both volumes have the same bytes, but for those that `mkfs.xfs` makes up.
fn assert_same(case: &MkfsCase, ours: &XfsDisk, theirs: &XfsDisk) {
    const PIECE: u64 = 64 << 10;
    let made_up = made_up(theirs);
    let files = [ours, theirs].map(|disk| File::open(disk.image()).unwrap());
    for (start, end) in files.iter().flat_map(data) {
        for at in (start..end).step_by(usize::try_from(PIECE).unwrap()) {
            let len = usize::try_from(PIECE.min(end - at)).unwrap();
            let mut pieces = [vec![0; len], vec![0; len]];
            for (file, piece) in files.iter().zip(&mut pieces) {
                file.read_exact_at(piece, at).unwrap();
                for &(place, len) in &made_up {
                    let (from, to) = (place.max(at), (place + len).min(at + piece.len() as u64));
                    if from < to {
                        let [from, to] = [from, to].map(|to| usize::try_from(to - at).unwrap());
                        piece[from..to].fill(0);
                    }
                }
            }
            let [ours, theirs] = pieces;
            if ours != theirs {
                let offset = ours.iter().zip(&theirs).position(|(one, other)| one != other);
                let offset = offset.unwrap() / 16 * 16;
                let shown = |bytes: &[u8]| format!("{:02x?}", &bytes[offset..offset + 16]);
                panic!(
                    "{case:?}\nat {} ours is {}, theirs is {}",
                    at + offset as u64,
                    shown(&ours),
                    shown(&theirs)
                );
            }
        }
    }
}

/// How many volumes a run makes: a few, or those in `OFFSHOOT_MKFS_CASES`.
fn cases(usual: u64) -> u64 {
    let given = std::env::var("OFFSHOOT_MKFS_CASES").ok();
    given.map_or(usual, |cases| cases.parse().expect("OFFSHOOT_MKFS_CASES is a number"))
}

#[test]
fn volumes_have_the_bytes_of_mkfs_xfs() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let mut made = 0;
    for _ in 0..cases(24) {
        let bytes = (300 * MIB) << random.below(10);
        let bytes = bytes + random.below(bytes);
        let case = MkfsCase::random(&mut random, bytes);
        let Some((ours, theirs)) = case.make_both(&judges) else { continue };
        assert_same(&case, &ours, &theirs);
        ours.assert_checks();
        XfsVolume::open(ours.device(), &XfsOptions::default()).unwrap();
        made += 1;
    }
    assert!(made > 0, "no options fit each other");
}

/// The numbers that `mkfs.xfs` prints with these names, in their order.
fn printed(text: &str, names: &[&str]) -> Vec<u64> {
    let mut rest = text;
    let number = |name: &&str| {
        let (_, behind) = rest.split_once(name).unwrap_or_else(|| panic!("no {name} in {text}"));
        let end = behind.find(|c: char| !c.is_ascii_digit()).unwrap();
        rest = behind;
        behind[..end].parse().unwrap()
    };
    names.iter().map(number).collect()
}

/// Volumes that are too large to make both: the sizes that `mkfs.xfs` would give them.
#[test]
fn the_sizes_of_large_volumes_are_those_of_mkfs_xfs() {
    let Some(judges) = judges::require() else { return };
    let mut random = Random::new(seed_of_run());
    let mut made = 0;
    for _ in 0..cases(16) {
        let bytes = (1 << 40) << random.below(7);
        let bytes = bytes + random.below(bytes);
        let case = MkfsCase::random(&mut random, bytes);
        let theirs = case.run_theirs(&judges, &case.disk(&judges), &["-N"]);
        let device = MemoryDevice::sparse(bytes);
        let ours = mkfs_xfs(&device, &case.ours);
        assert_eq!(ours.is_ok(), theirs.is_ok(), "{case:?}\n{ours:?}\n{theirs:?}");
        let Ok(theirs) = theirs else { continue };
        let XfsSuperblock { fields, geometry } =
            XfsSuperblock::parse(&contents(&device, &[(0, 32 << 10)])).unwrap();
        let log_unit = fields.logsunit.get() >> geometry.block_log;
        let ours = [
            geometry.ag_count,
            geometry.ag_blocks,
            fields.imax_pct.into(),
            fields.unit.get(),
            fields.width.get(),
            geometry.log_blocks,
            log_unit,
        ];
        let ours: Vec<_> = ours.map(u64::from).into();
        let names = ["agcount=", "agsize=", "imaxpct=", "sunit=", "swidth=", "blocks=", "sunit="];
        assert_eq!(ours, printed(&theirs, &names), "{case:?}");
        assert_eq!([geometry.blocks].to_vec(), printed(&theirs, &[" blocks="]), "{case:?}");
        made += 1;
    }
    assert!(made > 0, "no options fit each other");
}

/// The kinds of volumes that the kernel fills: options of ours, the size in MiB, and what the
/// kernel says about each of them.
fn kinds() -> [(XfsMkfsOptions, u64, &'static [&'static str]); 8] {
    let without = |list: &str| {
        let mut features = XfsMkfsFeatures::default();
        features.apply(list).unwrap();
        features
    };
    let first_v5 = "^finobt,^rmapbt,^reflink,^bigtime,^sparse,^nrext64,^exchange,^parent";
    let before_6_18 = without("^exchange,^parent");
    let stripe = Some(XfsStripe { unit: 256 << 10, width: 768 << 10 });
    [
        (options(), 300, &[]),
        (XfsMkfsOptions { features: before_6_18, ..options() }, 512, &[]),
        (XfsMkfsOptions { features: without(first_v5), ..options() }, 512, &[]),
        (XfsMkfsOptions { block_size: 1024, inode_size: 512, ..options() }, 512, &[]),
        // Both have the least log that the kernel takes, by the old rules and by the new ones.
        (XfsMkfsOptions { block_size: 65536, ..options() }, 2048, &[LARGE_BLOCKS]),
        (
            XfsMkfsOptions { block_size: 65536, features: before_6_18, ..options() },
            2048,
            &[LARGE_BLOCKS],
        ),
        (XfsMkfsOptions { sector_size: Some(4096), inode_size: 2048, ..options() }, 512, &[]),
        (XfsMkfsOptions { stripe, log_stripe: Some(256 << 10), ..options() }, 1024, &[]),
    ]
}

#[test]
fn the_kernel_fills_new_volumes() {
    let Some(judges) = judges::require() else { return };
    for (options, mib, kernel_says) in kinds() {
        let disk = XfsDisk::create(&judges, mib);
        let uuid = mkfs_xfs(&*disk.writable_device(), &options).unwrap();
        assert_eq!(uuid, options.uuid);
        disk.assert_checks();
        let mount = disk.mount("rw", kernel_says);
        fill::some(mount.path(), 7);
        drop(mount);
        disk.assert_checks();
        XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
    }
}

/// The bytes of a device whose every place may be written.
fn contents(device: &dyn BlockDevice, ranges: &[(u64, u64)]) -> Vec<u8> {
    let read = |&(start, end): &(u64, u64)| {
        let mut bytes = vec![0; usize::try_from(end - start).unwrap()];
        device.read_at(start, &mut bytes).unwrap();
        bytes
    };
    ranges.iter().flat_map(read).collect()
}

#[test]
fn the_same_options_make_the_same_bytes() {
    let made = |options: &XfsMkfsOptions| {
        let device = MemoryDevice::sparse(300 * MIB);
        mkfs_xfs(&device, options).unwrap();
        contents(&device, &[(0, MIB)])
    };
    let first = made(&options());
    assert!(first == made(&options()), "the same options made other bytes");
    for other in [
        XfsMkfsOptions { seed: 1, ..options() },
        XfsMkfsOptions { uuid: Uuid::from_u128(9), ..options() },
        XfsMkfsOptions { time: Timestamp { secs: 0, nanos: 0 }, ..options() },
        XfsMkfsOptions { root_owner: (1000, 100), ..options() },
    ] {
        assert!(first != made(&other), "{other:?} made the same bytes");
    }
}

/// A device full of other data, and one with another volume of XFS: nothing of them shows.
#[test]
fn old_contents_are_refused_and_then_wiped() {
    let Some(judges) = judges::require() else { return };
    let disk = XfsDisk::create(&judges, 512);
    let device = disk.writable_device();
    let junk = vec![0xa5; 1 << 20];
    for at in (0..512).map(|mib| mib * MIB) {
        device.write_at(at, &junk).unwrap();
    }
    // Junk is nothing that people keep.
    let small = XfsMkfsOptions { group_count: Some(5), ..options() };
    mkfs_xfs(&*device, &small).unwrap();
    let groups: Vec<_> = (1..5).map(|ag| superblock_place(&disk, ag)).collect();
    let error = mkfs_xfs(&*device, &options()).unwrap_err();
    assert!(
        matches!(&error, Error::Posix { errno: Errno::EXIST, what, .. } if what.contains("XFS")),
        "{error}"
    );
    let forced = XfsMkfsOptions { is_forced: true, uuid: Uuid::from_u128(7), ..options() };
    mkfs_xfs(&*device, &forced).unwrap();
    for place in groups {
        let old = contents(&*device, &[(place, place + 4)]);
        let is_new = (1..4).any(|ag| superblock_place(&disk, ag) == place);
        assert_eq!(old == b"XFSB", is_new, "the old superblock at {place}");
    }
    disk.assert_checks();
    let mount = disk.mount("rw", &[]);
    fill::some(mount.path(), 8);
    drop(mount);
    disk.assert_checks();
}

/// A power cut while a new volume replaces an old one leaves the old one, the new one, or none. A
/// volume that opens is complete.
#[test]
fn a_power_cut_leaves_one_volume_or_none() {
    let base: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(300 * MIB));
    mkfs_xfs(&*base, &options()).unwrap();
    let crash = CrashDevice::new(base);
    let new = XfsMkfsOptions { uuid: Uuid::from_u128(7), is_forced: true, ..options() };
    mkfs_xfs(&crash, &new).unwrap();
    let (mut none, mut olds, mut news) = (0, 0, 0);
    for state in crash.log().states(&CrashPlan::default()) {
        let [device] = <[_; 1]>::try_from(state.unwrap().devices).unwrap();
        let device: Arc<dyn BlockDevice> = Arc::new(device);
        let Ok(volume) = XfsVolume::open(device.clone(), &XfsOptions::default()) else {
            none += 1;
            continue;
        };
        volume.read_dir(volume.root(), 0, &mut |_| ControlFlow::Continue(())).unwrap();
        volume.attr(volume.root()).unwrap();
        let superblock = XfsSuperblock::parse(&contents(&*device, &[(0, 32 << 10)])).unwrap();
        let is_new = superblock.geometry.uuid == new.uuid;
        if is_new { news += 1 } else { olds += 1 }
    }
    assert!(none > 0 && olds > 0 && news > 0, "{none} {olds} {news}");
}

fn superblock_place(disk: &XfsDisk, ag: u32) -> u64 {
    superblock(disk).geometry.place(AgNumber(ag), AgBlock(0)).bytes()
}

/// What is refused: changes of the options, and a word of the message.
#[test]
fn what_does_not_fit_is_refused_by_name() {
    type Change = fn(&mut XfsMkfsOptions);
    let refused: [(Change, &str); 22] = [
        (|o| o.block_size = 512, "version 4"),
        (|o| o.block_size = 3000, "block size"),
        (|o| o.block_size = 128 << 10, "block size"),
        (|o| o.sector_size = Some(8192), "sector size"),
        (|o| o.inode_size = 256, "inode size"),
        (|o| o.inode_size = 4096, "inode size"),
        (|o| o.dir_block_size = Some(2048), "directory block size"),
        (|o| o.stripe = Some(XfsStripe { unit: 4096, width: 6000 }), "stripe"),
        (|o| o.stripe = Some(XfsStripe { unit: 2048, width: 4096 }), "stripe"),
        (|o| o.log_stripe = Some(6144), "log stripe"),
        (|o| o.log_stripe = Some(512 << 10), "log stripe"),
        (|o| o.log_size = Some(63 << 20), "log of"),
        (|o| o.log_size = Some(1 << 40), "log of"),
        (|o| o.log_size = Some((64 << 20) + 1), "log of"),
        (|o| o.group_size = Some(8 << 20), "groups of"),
        (|o| o.group_count = Some(1), "two are the least"),
        (|o| o.group_count = Some(0), "two are the least"),
        (|o| (o.group_size, o.group_count) = (Some(64 << 20), Some(8)), "one is enough"),
        (|o| "thirteen byte".clone_into(&mut o.label), "12 bytes"),
        (|o| o.uuid = Uuid::nil(), "all zeros"),
        (|o| o.inode_percent = Some(0), "%"),
        (|o| o.time.secs = i64::MAX, "time"),
    ];
    let device = MemoryDevice::sparse(512 * MIB);
    for (change, word) in refused {
        let mut options = options();
        change(&mut options);
        let error = mkfs_xfs(&device, &options).unwrap_err();
        assert!(
            matches!(&error, Error::Posix { errno: Errno::INVAL, what, .. } if what.contains(word)),
            "{word}: {error}"
        );
    }
    for bytes in [0, 511, 299 * MIB] {
        let error = mkfs_xfs(&MemoryDevice::sparse(bytes), &options()).unwrap_err();
        assert!(matches!(error, Error::Posix { errno: Errno::NOSPC, .. }), "{bytes}: {error}");
    }
    assert_eq!(contents(&device, &[(0, MIB)]), vec![0; 1 << 20], "a refusal wrote something");
}
