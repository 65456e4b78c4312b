//! States judged from outside: by `btrfs check`, and by the kernel, which mounts and changes them.

use std::ffi::OsStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, Reporter, SubvolumeId, VolumeReport};
use offshoot_btrfs_format::superblock::{SUPERBLOCK_OFFSETS, SUPERBLOCK_SIZE, Superblock};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::checked::ShownVolume;
use offshoot_testkit::btrfs::disks::{AttachedImages, Disks, MountedMembers};
use offshoot_testkit::btrfs::judges::{self, Judges};
use offshoot_testkit::btrfs::outside::{change, require_change, require_same};
use offshoot_testkit::compare::{Aspect, Compare};
use offshoot_testkit::crash::{MemberDevices, TestedEngine};
use offshoot_testkit::kernel_log::KernelLog;
use offshoot_testkit::run::command;
use offshoot_vfs::{SetAttr, Timestamp};

use crate::engine::OURS;
use crate::shown::show;

/// The outside judges, if this machine has them.
pub(crate) struct OutsideJudges {
    judges: Judges,
    /// All states of a run have the same id, and the kernel mounts one volume of an id at a time.
    turn: Mutex<()>,
}

impl OutsideJudges {
    pub(crate) fn new() -> Option<Self> {
        Some(Self { judges: judges::require()?, turn: Mutex::default() })
    }

    /// Requires that the state is sound, that the kernel shows what we show, and that the kernel
    /// can change it:
    ///
    /// 1. `btrfs check` finds nothing.
    /// 2. The kernel mounts it, and shows path by path what we show. We show a pending log twice:
    ///    replayed in memory, and replayed on the devices.
    /// 3. The kernel makes a file there, and `btrfs check` finds nothing afterwards.
    /// 4. We open what the kernel left, and show path by path what it shows.
    ///
    /// In none of these steps does the kernel complain in its log.
    pub(crate) fn judge(&self, devices: &[Arc<MemoryDevice>]) -> Result<(), String> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let devices = with_superblocks(devices)?;
        let disks = Disks::create(&self.judges, devices.len(), devices[0].size_bytes() >> 20);
        let contents: Vec<_> = devices.iter().map(|device| &**device as &dyn BlockDevice).collect();
        disks.fill(&contents).map_err(|e| format!("a copy of the state: {e}"))?;
        check(&disks)?;
        let ShownVolume { has_log, has_orphans, .. } =
            show(&shared(&devices)).map_err(failed("opening it for a judge"))?;
        let mut log = KernelLog::start();
        let (is_changed, mut complaints) = show_and_change(&disks, &devices, has_log)?;
        check(&disks).map_err(|e| format!("behind the kernel: {e}"))?;
        complaints.extend(show_changed(&disks, is_changed)?);
        complaints.extend(log.complaints(&[]));
        // The tree of UUIDs is current as of a generation. A replay commits once more, so the
        // kernel finds that tree out of date and looks through it. Orphans may do the same: now and
        // then a thread of the kernel commits their removal while it mounts.
        let is_look = |line: &String| line.contains("checking UUID tree");
        if complaints.iter().any(is_look) && (has_log || has_orphans) {
            complaints.retain(|line| !is_look(line));
        }
        if complaints.is_empty() {
            return Ok(());
        }
        Err(format!("the kernel complains:\n{}", complaints.join("\n")))
    }
}

fn shared(devices: &[Arc<MemoryDevice>]) -> MemberDevices {
    devices.iter().map(|device| device.clone() as Arc<dyn BlockDevice>).collect()
}

fn at_commit() -> EngineOptions {
    EngineOptions { is_log_ignored: true, ..EngineOptions::default() }
}

/// Whether the primary superblocks of all members name the same log.
fn all_name_one_log(devices: &[Arc<MemoryDevice>]) -> bool {
    let log_of = |device: &Arc<MemoryDevice>| {
        let mut bytes = vec![0; SUPERBLOCK_SIZE];
        device.read_at(SUPERBLOCK_OFFSETS[0], &mut bytes).expect("memory");
        let found = Superblock::parse(&bytes, SUPERBLOCK_OFFSETS[0]);
        found.ok().map(|superblock| superblock.item.log_root.get())
    };
    devices.windows(2).all(|pair| log_of(&pair[0]) == log_of(&pair[1]))
}

/// Whether the kernel shows another allowed view of a state that was cut between the superblocks of
/// two members: it may take the superblock that names no log, or names the one before.
fn shows_other(
    compare: &Compare,
    devices: &[Arc<MemoryDevice>],
    mount: &MountedMembers,
) -> Result<bool, String> {
    if all_name_one_log(devices) {
        return Ok(false);
    }
    let mut rotated = shared(devices);
    let mut views = vec![shown_with(rotated.clone(), &at_commit())?];
    for _ in 1..devices.len() {
        // Of several superblocks with the same generation we take the last one.
        rotated.rotate_left(1);
        views.push(top(rotated.clone())?);
    }
    Ok(views.iter().any(|view| require_same(compare, view, mount).is_ok()))
}

/// Has the kernel show and change the state. Returns whether the kernel had room for the change,
/// and its complaints.
fn show_and_change(
    disks: &Disks,
    devices: &[Arc<MemoryDevice>],
    has_log: bool,
) -> Result<(bool, Vec<String>), String> {
    let mut ours = vec![("in memory", top(shared(devices))?)];
    let mut compare = Compare::default();
    if has_log {
        // A name that a replay removes gives its file and its directory the time of the replay.
        compare = compare.without(Aspect::TimesOfNames);
        let replayed: Vec<_> = devices.iter().map(|device| Arc::new(device.snapshot())).collect();
        drop(OURS.open_writable(shared(&replayed)).map_err(failed("replaying its log"))?);
        ours.push(("replayed", top(shared(&replayed))?));
    }
    let (mount, mut log) = mount(disks, "rw,noatime,subvolid=5")?;
    for (which, ours) in &ours {
        let same = require_same(&compare, ours, &mount);
        if same.is_err() && has_log && shows_other(&compare, devices, &mount)? {
            continue;
        }
        same.map_err(|e| format!("{which}: {e}"))?;
    }
    let is_changed = change(&mount, &ours[0].1)?;
    // While the volume is mounted, no other volume is on these devices.
    Ok((is_changed, log.complaints(&mount.devices())))
}

/// Opens what the kernel left, and has the kernel show it again. Returns the complaints of the
/// kernel.
fn show_changed(disks: &Disks, is_changed: bool) -> Result<Vec<String>, String> {
    OURS.check(disks.devices()).map_err(failed("what the kernel left"))?;
    let ours = top(disks.devices())?;
    let (mount, mut log) = mount(disks, "ro,noatime,subvolid=5")?;
    require_same(&Compare::default(), &ours, &mount)
        .map_err(|e| format!("what the kernel left: {e}"))?;
    if is_changed {
        require_change(&ours)?;
    }
    Ok(log.complaints(&mount.devices()))
}

fn failed(what: &'static str) -> impl Fn(offshoot_vfs::Error) -> String {
    move |error| format!("{what}: {error}")
}

/// The first subvolume, as our reader shows it.
fn top(devices: MemberDevices) -> Result<Filesystem, String> {
    shown_with(devices, &EngineOptions::default())
}

fn shown_with(devices: MemberDevices, options: &EngineOptions) -> Result<Filesystem, String> {
    let volume = BtrfsVolume::open(devices, options);
    volume.and_then(|volume| volume.filesystem(SubvolumeId::FS)).map_err(failed("opening it"))
}

/// Mounts all members, and returns the kernel's log from then on.
///
/// The log begins after the devices are attached: the kernel may have complained of an earlier user
/// of these loop devices. Another process that scans or forgets devices at the wrong moment makes
/// the mount of several members fail, so a failed mount is tried once more.
fn mount(disks: &Disks, options: &str) -> Result<(MountedMembers, KernelLog), String> {
    let mount = || {
        let attached = AttachedImages::new(disks.images());
        let log = KernelLog::start();
        attached.mount(options).map(|mount| (mount, log))
    };
    mount().or_else(|_| mount())
}

/// Neither the kernel nor `btrfs check` looks for a copy of a torn superblock. Our next commit
/// writes the torn one anew.
fn with_superblocks(devices: &[Arc<MemoryDevice>]) -> Result<Vec<Arc<MemoryDevice>>, String> {
    let devices: Vec<_> = devices.iter().map(|device| Arc::new(device.snapshot())).collect();
    let shared = || devices.iter().map(|device| device.clone() as Arc<_>).collect();
    let is_torn = Arc::new(AtomicBool::new(false));
    let seen = is_torn.clone();
    let reporter: Reporter = Arc::new(move |report| {
        if matches!(report, VolumeReport::SuperblockCopy { .. }) {
            seen.store(true, Ordering::Relaxed);
        }
    });
    let options = EngineOptions { reporter: Some(reporter), ..Default::default() };
    BtrfsVolume::open(shared(), &options).map_err(|e| format!("opening it for a judge: {e}"))?;
    if is_torn.load(Ordering::Relaxed) {
        let fs = OURS.open_writable(shared()).map_err(|e| format!("mending it: {e}"))?;
        let at = Timestamp::default();
        let touched = fs.set_attr(fs.root(), &SetAttr::default(), at).and_then(|()| fs.sync());
        touched.map_err(|e| format!("mending it: {e}"))?;
    }
    Ok(devices)
}

fn check(disks: &Disks) -> Result<(), String> {
    let images = disks.images();
    let check = |place: &OsStr| {
        let mut check = command("btrfs");
        check.args(["check", "--readonly", "--check-data-csum"]).arg(place);
        check.output().expect("btrfs check runs")
    };
    // Only several members have to be block devices.
    let output = match images {
        [image] => check(image.as_ref()),
        _ => AttachedImages::new(images).checked(|device| check(device.as_ref())),
    };
    if output.status.success() {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    Err(format!("btrfs check: {}: {}", output.status, String::from_utf8_lossy(&said)))
}
