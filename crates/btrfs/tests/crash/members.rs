//! Members that fail while they are written: what each profile survives, for each kind of write,
//! and how members that come back are brought up to date.

use std::hash::{DefaultHasher, Hasher};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, Filesystem, ScrubCounts, ScrubOptions, SubvolumeId, VolumeReport,
};
use offshoot_btrfs_format::chunk::{BlockGroupFlags, Chunk, Profile};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE};
use offshoot_device::{BlockDevice, CrashPlan, Fault, FaultDevice, MemoryDevice, RequestKind};
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::crash::explore::{ExplorationCounts, StateExplorer, StateJudge};
use offshoot_testkit::crash::generate::Generator;
use offshoot_testkit::crash::{MemberDevices, TestedEngine, Workload, report};
use offshoot_testkit::random::seed_of_run;
use offshoot_testkit::run::command;
use offshoot_vfs::{
    EntryPlace, Errno, Error, FileFlags, FileId, FileSystem, FileSystemMut, NewFile, Result,
    Timestamp,
};

use crate::engine::{OURS, SETS, VolumeShape, volume};
use crate::judge::OutsideJudges;
use crate::{plan, some_twos};

const AT: Timestamp = Timestamp { secs: 1_700_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o600, uid: 0, gid: 0, umask: None, at: AT };

/// The length of each file, in bytes: several stripe units of a striped profile.
const LEN: usize = 512 << 10;

/// The name of the file with checksums, and of the one without.
const NAMES: [&[u8]; 2] = [b"summed", b"plain"];

/// A kind of write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteKind {
    Data,
    /// Tree blocks, of a commit or of a log.
    Blocks,
    Primary,
    /// The copies of the superblock.
    Copies,
    Flush,
}

const KINDS: [WriteKind; 5] =
    [WriteKind::Data, WriteKind::Blocks, WriteKind::Primary, WriteKind::Copies, WriteKind::Flush];

/// The call that makes changes durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DurableCall {
    Sync,
    Fsync,
}

/// The profile of metadata and data, and the number of members.
const SHAPES: [(Profile, usize); 7] = [
    (Profile::Single, 2),
    (Profile::Dup, 1),
    (Profile::Raid0, 2),
    (Profile::Raid1, 2),
    (Profile::Raid1c3, 3),
    (Profile::Raid1c4, 4),
    (Profile::Raid10, 4),
];

/// A volume with both files. The test lets some of its members fail.
struct StruckVolume {
    memory: Vec<Arc<MemoryDevice>>,
    faulty: Vec<Arc<FaultDevice>>,
    reports: Arc<Mutex<Vec<VolumeReport>>>,
    chunks: Vec<Chunk>,
}

fn devices<D: BlockDevice + 'static>(all: &[Arc<D>]) -> MemberDevices {
    all.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect()
}

fn options(reports: &Arc<Mutex<Vec<VolumeReport>>>) -> EngineOptions {
    let reports = reports.clone();
    EngineOptions {
        commit_interval: None,
        is_degraded: true,
        reporter: Some(Arc::new(move |report: &VolumeReport| {
            reports.lock().expect("no panic").push(report.clone());
        })),
        ..EngineOptions::default()
    }
}

fn open_writable(
    devices: MemberDevices,
    reports: &Arc<Mutex<Vec<VolumeReport>>>,
) -> Result<Filesystem> {
    BtrfsVolume::open_writable(devices, &options(reports))?.filesystem(SubvolumeId::FS)
}

fn file(fs: &Filesystem, name: &[u8]) -> FileId {
    fs.lookup(fs.root(), name).expect("the file is there")
}

/// Overwrites both files with this byte, and makes that durable.
fn write(fs: &Filesystem, byte: u8, by: DurableCall) -> Result<()> {
    for name in NAMES {
        fs.write(file(fs, name), 0, &vec![byte; LEN], AT)?;
        if by == DurableCall::Fsync {
            fs.fsync(file(fs, name))?;
        }
    }
    if by == DurableCall::Sync { fs.sync() } else { Ok(()) }
}

/// Requires that both files hold `byte` everywhere.
#[track_caller]
fn require(devices: MemberDevices, byte: u8, what: &str) {
    let reports = Arc::default();
    let volume = BtrfsVolume::open(devices, &options(&reports));
    let fs = volume.and_then(|volume| volume.filesystem(SubvolumeId::FS));
    let fs = fs.unwrap_or_else(|e| panic!("{what}: {e}"));
    for name in NAMES {
        let mut found = vec![0; LEN];
        let read = fs.read(file(&fs, name), 0, &mut found);
        assert_eq!(read.map_err(|e| e.to_string()), Ok(LEN), "{what}: {reports:?}");
        let other = found.iter().position(|&one| one != byte);
        assert_eq!(other, None, "{what}: {} is not {byte}", String::from_utf8_lossy(name));
    }
}

impl StruckVolume {
    fn new(profile: Profile, members: usize) -> Self {
        let shape = VolumeShape { members, profiles: [profile; 2], ..SETS[0] };
        let memory: Vec<_> =
            volume(7, shape).into_iter().map(|one| Arc::new(MemoryDevice::over(one))).collect();
        let reports = Arc::default();
        let fs = open_writable(devices(&memory), &reports).expect("it opens");
        for name in NAMES {
            let file = fs.create(EntryPlace { dir: fs.root(), name }, &NEW).expect("a file");
            if name == NAMES[1] {
                fs.set_flags(file, FileFlags::NODATACOW, AT).expect("it is empty");
            }
        }
        write(&fs, b'a', DurableCall::Sync).expect("nothing fails yet");
        let chunks = fs.volume().chunks().collect();
        let faulty: Vec<_> =
            memory.iter().map(|one| Arc::new(FaultDevice::new(one.clone()))).collect();
        Self { memory, faulty, reports, chunks }
    }

    /// Makes this kind of write fail on `members` from now on. On DUP it fails on the first copy
    /// only, unless `hits_both` is set.
    fn strike(&self, kind: WriteKind, members: &[usize], hits_both: bool) {
        let flag = match kind {
            WriteKind::Data => BlockGroupFlags::DATA,
            _ => BlockGroupFlags::METADATA | BlockGroupFlags::SYSTEM,
        };
        for &member in members {
            let device = &self.faulty[member];
            match kind {
                WriteKind::Data | WriteKind::Blocks => {
                    for chunk in self.chunks.iter().filter(|chunk| chunk.flags.0 & flag != 0) {
                        let copies = if hits_both { usize::MAX } else { 1 };
                        let own =
                            chunk.stripes.iter().filter(|one| one.device.0 == member as u64 + 1);
                        for stripe in own.take(copies) {
                            let at = stripe.physical.0;
                            device.add_to(
                                RequestKind::Writes,
                                at..at + chunk.stripe_bytes(),
                                Fault::Error,
                            );
                        }
                    }
                }
                WriteKind::Primary => {
                    device.add_to(
                        RequestKind::Writes,
                        superblock(SUPERBLOCK_OFFSETS[0]),
                        Fault::Error,
                    );
                }
                WriteKind::Copies => {
                    device.add_to(
                        RequestKind::Writes,
                        superblock(SUPERBLOCK_OFFSETS[1]),
                        Fault::Error,
                    );
                }
                WriteKind::Flush => {
                    let next = device.count(RequestKind::Flushes);
                    (next..next + 64).for_each(|number| {
                        device.strike(RequestKind::Flushes, number, Fault::Error);
                    });
                }
            }
        }
    }

    /// Whether the other members hold everything of each chunk.
    fn can_do_without(&self, members: &[usize]) -> bool {
        let is_gone = |stripe: &offshoot_btrfs_format::chunk::Stripe| {
            members.iter().any(|&member| stripe.device.0 == member as u64 + 1)
        };
        self.chunks.iter().all(|chunk| match chunk.profile {
            Profile::Raid0 => !chunk.stripes.iter().any(is_gone),
            Profile::Raid10 => chunk.stripes.chunks(2).all(|pair| !pair.iter().all(is_gone)),
            _ => !chunk.stripes.iter().all(is_gone),
        })
    }

    fn without(&self, gone: &[usize]) -> MemberDevices {
        let all = devices(&self.memory).into_iter().enumerate();
        all.filter(|(index, _)| !gone.contains(index)).map(|(_, device)| device).collect()
    }

    fn said(&self, is_so: impl Fn(&VolumeReport) -> bool) -> usize {
        self.reports.lock().expect("no panic").iter().filter(|one| is_so(one)).count()
    }
}

fn superblock(at: u64) -> Range<u64> {
    at..at + SUPERBLOCK_SIZE as u64
}

/// Scrubs a volume that nothing else uses.
fn scrub(devices: MemberDevices) -> ScrubCounts {
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open(devices, &options).expect("it opens");
    let watch = |_: &offshoot_btrfs::ScrubEvent<'_>| ControlFlow::Continue(());
    volume.scrub(&ScrubOptions::default(), &watch).expect("a scrub")
}

fn stale(devices: MemberDevices) -> usize {
    let volume = BtrfsVolume::open(devices, &EngineOptions::default()).expect("it opens");
    volume.members().iter().filter(|member| member.is_stale()).count()
}

/// Requires that a volume survives when members fail, if its profile can, and that it takes them
/// back.
fn survive(
    kind: WriteKind,
    by: DurableCall,
    profile: Profile,
    count: usize,
    gone: &[usize],
) -> StruckVolume {
    let what = format!("{kind:?} by {by:?} on {gone:?} of {count} with {profile}");
    let struck = StruckVolume::new(profile, count);
    let spared = struck.can_do_without(gone);
    let fs = open_writable(devices(&struck.faulty), &struck.reports).expect("it opens");
    struck.strike(kind, gone, true);
    let mut outcome = write(&fs, b'b', by);
    // An fsync writes no copies of the superblock, and logs one file at a time.
    if outcome.is_ok() && by == DurableCall::Fsync {
        outcome = write(&fs, b'b', by);
    }
    if !spared {
        assert!(matches!(outcome, Err(Error::Io { .. })), "{what}: {outcome:?}");
        let refused = fs.sync().err().unwrap_or_else(|| panic!("{what}: it goes on"));
        assert_eq!(refused.errno(), Errno::ROFS, "{what}: {refused}");
        drop(fs);
        OURS.check(devices(&struck.memory)).unwrap_or_else(|e| panic!("{what}: {e}"));
        return struck;
    }
    outcome.unwrap_or_else(|e| panic!("{what}: {e}"));
    let failed = struck.said(|one| matches!(one, VolumeReport::MemberFailed { .. }));
    assert_eq!(failed, gone.len(), "{what}: {:?}", struck.reports);
    // The state that a crash leaves now, with these members and without them.
    let cut: Vec<_> = struck.memory.iter().map(|one| Arc::new(one.snapshot())).collect();
    require(devices(&cut), b'b', &what);
    require(struck.without(gone), b'b', &format!("{what}, which are gone"));
    write(&fs, b'c', by).unwrap_or_else(|e| panic!("{what}, going on: {e}"));
    drop(fs);
    require(devices(&struck.memory), b'c', &what);
    require(struck.without(gone), b'c', &format!("{what}, which are gone"));
    assert_eq!(stale(devices(&struck.memory)), gone.len(), "{what}");
    // The engine leaves these members out when it opens the volume for writing again.
    let before: Vec<_> = gone.iter().map(|&one| hash_of(&struck.memory[one])).collect();
    let fs = open_writable(devices(&struck.memory), &struck.reports).expect("it opens");
    let left_out = struck.said(|one| matches!(one, VolumeReport::LeftOut { .. }));
    assert_eq!(left_out, gone.len(), "{what}: {:?}", struck.reports);
    write(&fs, b'd', DurableCall::Sync).unwrap_or_else(|e| panic!("{what}, opened again: {e}"));
    drop(fs);
    for (&member, before) in gone.iter().zip(&before) {
        assert!(hash_of(&struck.memory[member]) == *before, "{what}: {member} was written");
    }
    require(devices(&struck.memory), b'd', &what);
    let counts = scrub(devices(&struck.memory));
    assert_eq!(counts.left_errors, 0, "{what}: {counts:?}");
    assert_eq!(stale(devices(&struck.memory)), 0, "{what}: {counts:?}");
    let counts = scrub(devices(&struck.memory));
    assert_eq!(counts.found_errors(), 0, "{what}: {counts:?}");
    // Now these members have everything, so others may be missing.
    for member in gone {
        let others: Vec<_> = (0..count).filter(|other| other != member).collect();
        if profile == Profile::Raid10 {
            for other in others {
                require(struck.without(&[other]), b'd', &format!("{what}, without {other}"));
            }
        } else {
            require(struck.without(&others), b'd', &format!("{what}, {member} alone"));
        }
    }
    struck
}

/// A hash that changes when the device is written.
fn hash_of(device: &MemoryDevice) -> u64 {
    let mut hasher = DefaultHasher::new();
    device.hash_changes(&mut hasher);
    hasher.finish()
}

/// Regression: one failed write on one mirror stopped all writing, although another mirror was
/// whole.
#[test]
fn what_a_profile_survives_is_survived_for_every_kind_of_write() {
    let (mut survived, mut refused) = (0, 0);
    for (profile, count) in SHAPES {
        for kind in KINDS {
            for by in [DurableCall::Sync, DurableCall::Fsync] {
                // All copies of DUP are on one member.
                for failing in 1..=count {
                    let first = (failing + kind as usize) % (count - failing + 1);
                    let gone: Vec<_> = (first..first + failing).collect();
                    let struck = StruckVolume::new(profile, count);
                    if !is_certain(&struck, kind, profile, &gone) {
                        continue;
                    }
                    if struck.can_do_without(&gone) {
                        survived += 1;
                    } else {
                        refused += 1;
                    }
                    survive(kind, by, profile, count, &gone);
                }
            }
        }
    }
    report(format_args!("{survived} survived, {refused} refused"));
    assert!(survived >= 60 && refused >= 40, "{survived} survived, {refused} refused");
}

/// Whether, on a volume that cannot do without these members, some writes of this kind certainly go
/// to them. A few tree blocks may all lie on some of the stripes. With the single profile, a chunk
/// is on one member.
fn is_certain(struck: &StruckVolume, kind: WriteKind, profile: Profile, gone: &[usize]) -> bool {
    let is_striped = matches!(profile, Profile::Single | Profile::Raid0 | Profile::Raid10);
    let is_few = kind == WriteKind::Blocks || kind == WriteKind::Data && profile == Profile::Single;
    let has_all = gone.len() == struck.memory.len();
    !is_striped || !is_few || has_all || struck.can_do_without(gone)
}

/// A write of something with checksums survives when one copy of DUP fails, and a scrub finds it.
#[test]
fn one_copy_of_dup_stays_bad_and_is_repaired() {
    for kind in [WriteKind::Blocks, WriteKind::Data] {
        let struck = StruckVolume::new(Profile::Dup, 1);
        let fs = open_writable(devices(&struck.faulty), &struck.reports).expect("it opens");
        struck.strike(kind, &[0], false);
        let summed = file(&fs, NAMES[0]);
        fs.write(summed, 0, &vec![b'b'; LEN], AT).expect("in memory");
        fs.sync().unwrap_or_else(|e| panic!("{kind:?}: {e}"));
        assert!(struck.said(|one| matches!(one, VolumeReport::BadWrite { .. })) > 0, "{kind:?}");
        if kind == WriteKind::Data {
            // Without a checksum, nothing would show that one of the copies is old.
            fs.write(file(&fs, NAMES[1]), 0, &vec![b'b'; LEN], AT).expect("in memory");
            assert!(matches!(fs.sync(), Err(Error::Io { .. })));
        }
        drop(fs);
        OURS.check(devices(&struck.memory)).expect("it is in order");
        let counts = scrub(devices(&struck.memory));
        assert!(counts.corrected_errors > 0 && counts.left_errors == 0, "{kind:?}: {counts:?}");
        assert_eq!(scrub(devices(&struck.memory)).found_errors(), 0, "{kind:?}");
        let fs = open_writable(devices(&struck.memory), &struck.reports).expect("it opens");
        let mut found = vec![0; LEN];
        fs.read(file(&fs, NAMES[0]), 0, &mut found).expect("it reads");
        assert!(found.iter().all(|&byte| byte == b'b'), "{kind:?}");
    }
}

/// Where a chunk is on one member alone: a failed write of a tree block is survived if its other
/// copy was written, and a failed barrier is not survived.
#[test]
fn a_member_that_has_something_alone_is_not_done_without() {
    for (kind, is_survived) in
        [(WriteKind::Blocks, true), (WriteKind::Flush, false), (WriteKind::Primary, false)]
    {
        let shape = VolumeShape { profiles: [Profile::Raid1, Profile::Raid0], ..SETS[1] };
        let base = volume(8, shape);
        let fs = open_writable(base.clone(), &Arc::default()).expect("it opens");
        fs.create(EntryPlace { dir: fs.root(), name: b"before" }, &NEW).expect("a file");
        fs.sync().expect("a commit");
        let chunks: Vec<_> = fs.volume().chunks().collect();
        drop(fs);
        let memory: Vec<_> =
            base.into_iter().map(|one| Arc::new(MemoryDevice::over(one))).collect();
        let faulty: Vec<_> =
            memory.iter().map(|one| Arc::new(FaultDevice::new(one.clone()))).collect();
        let struck = StruckVolume { memory, faulty, reports: Arc::default(), chunks };
        let fs = open_writable(devices(&struck.faulty), &struck.reports).expect("it opens");
        struck.strike(kind, &[1], true);
        fs.create(EntryPlace { dir: fs.root(), name: b"new" }, &NEW).expect("a file");
        assert_eq!(fs.sync().is_ok(), is_survived, "{kind:?}");
        drop(fs);
        OURS.check(devices(&struck.memory)).expect("it is in order");
        // As after a power cut between two superblocks.
        assert_eq!(
            stale(devices(&struck.memory)),
            usize::from(kind == WriteKind::Primary),
            "{kind:?}"
        );
        assert_eq!(scrub(devices(&struck.memory)).left_errors, 0, "{kind:?}");
        assert_eq!(stale(devices(&struck.memory)), 0, "{kind:?}");
    }
}

/// The kernel shows the errors that we counted. After a scrub of ours has brought the members up to
/// date, the kernel finds no error.
#[test]
fn the_kernel_shows_the_errors_and_a_whole_volume() {
    let Some(judges) = judges::require() else { return };
    let shapes = [(Profile::Raid1, 2), (Profile::Raid1c3, 3), (Profile::Raid10, 4)];
    for (profile, count) in shapes {
        for kind in [WriteKind::Data, WriteKind::Blocks, WriteKind::Flush] {
            let gone = count - 1;
            let struck = survive(kind, DurableCall::Sync, profile, count, &[gone]);
            let disks = Disks::create(&judges, count, struck.memory[0].size_bytes() >> 20);
            let contents: Vec<_> =
                struck.memory.iter().map(|device| &**device as &dyn BlockDevice).collect();
            disks.fill(&contents).expect("a copy");
            disks.assert_checks();
            let mount = disks.mount_watched("rw,noatime", &["errs: wr", "checking UUID tree"]);
            let output = command("btrfs").args(["device", "stats"]).arg(mount.path()).output();
            let output = output.expect("btrfs runs");
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            let (name, other) =
                if kind == WriteKind::Flush { ("flush", "write") } else { ("write", "flush") };
            for (member, device) in mount.devices().iter().enumerate() {
                let value = |of: &str| -> u64 {
                    let key = format!("[{device}].{of}_io_errs");
                    let line = said.lines().find(|line| line.starts_with(&key));
                    let line = line.unwrap_or_else(|| panic!("no {key} in {said}"));
                    line.rsplit(' ').next().expect("a number").parse().expect("a number")
                };
                assert_eq!(value(name) > 0, member == gone, "{profile}, {kind:?}: {said}");
                assert_eq!(value(other), 0, "{profile}, {kind:?}: {said}");
            }
            for name in NAMES {
                let path = mount.path().join(String::from_utf8_lossy(name).as_ref());
                let found = std::fs::read(path).expect("it reads");
                assert!(found == vec![b'd'; LEN], "{profile}, {kind:?}");
            }
            let scrub =
                command("btrfs").args(["scrub", "start", "-BrR"]).arg(mount.path()).output();
            let scrub = scrub.expect("btrfs scrub runs");
            let said = String::from_utf8_lossy(&scrub.stdout);
            for counter in ["csum_errors: 0", "verify_errors: 0", "super_errors: 0"] {
                assert!(said.contains(counter), "{profile}, {kind:?}: {said}");
            }
        }
    }
}

/// Brings members up to date as an administrator does after a failure: a pending log is replayed
/// first.
fn bring_up_to_date(memory: &[Arc<MemoryDevice>]) -> std::result::Result<(), String> {
    let failed = |what: &'static str| move |e: Error| format!("{what}: {e}");
    drop(OURS.open_writable(devices(memory)).map_err(failed("replaying"))?);
    let counts = scrub(devices(memory));
    if counts.left_errors > 0 || stale(devices(memory)) > 0 {
        return Err(format!("a scrub leaves errors: {counts:?}"));
    }
    Ok(())
}

/// Whether a log is pending.
fn has_log(memory: &[Arc<MemoryDevice>]) -> bool {
    let options = EngineOptions { is_log_ignored: true, ..EngineOptions::default() };
    let volume = BtrfsVolume::open(devices(memory), &options).expect("it opens");
    volume.superblock().has_pending_log()
}

/// The power is cut at every moment after a member failed. What was promised is there, the engine
/// does not trust the member, and the member can come back.
#[test]
fn cuts_behind_failures() {
    let (seed, generator) = (seed_of_run(), Generator::default());
    let outside = OutsideJudges::new();
    let judge = |devices: &[Arc<MemoryDevice>]| {
        let copy: Vec<_> = devices.iter().map(|one| Arc::new(one.snapshot())).collect();
        bring_up_to_date(&copy)?;
        let Some(outside) = &outside else { return Ok(()) };
        let judged = outside.judge(&copy);
        // The judge allows the look through the tree of UUIDs only where it sees a log, or files
        // without names, itself.
        let is_look = |line: &str| line.trim().is_empty() || line.contains("checking UUID tree");
        match &judged {
            Err(problem) if problem.lines().skip(1).all(is_look) && has_log(devices) => Ok(()),
            _ => judged,
        }
    };
    let threes = VolumeShape { members: 3, profiles: [Profile::Raid1c3; 2], ..SETS[0] };
    for shape in [SETS[0], threes, SETS[2]] {
        let plan = CrashPlan { exhaustive_limit: 1, samples_per_epoch: 3, ..plan(seed) };
        let judge = Some((&judge as &StateJudge<'_>, 400));
        let explorer = StateExplorer { engine: &OURS, image: volume(seed, shape), plan, judge };
        let in_place = some_twos(&generator, usize::MAX, seed).filter(Workload::writes_in_place);
        let mut tally = ExplorationCounts::default();
        for workload in in_place.take(1).chain(some_twos(&generator, 1, seed ^ 1)) {
            let outcome = explorer.explore_failing(&workload, 5 * shape.members);
            tally += outcome.unwrap_or_else(|e| panic!("{shape}: {workload}: {e}"));
        }
        report(format_args!("{shape}: {tally}"));
        assert!(tally.states > 0 && tally.judged > 0, "nothing was explored");
    }
}
