//! Power cuts while subvolumes come and go.
//!
//! Each operation is done whole or not at all, and operations run one after the other. So every
//! state shows exactly what was there after some operation: no earlier than the last sync, and no
//! later than the last operation that had begun. In every state the test drops what deleted
//! subvolumes hold. The accounts are right before and after that.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::hash::{DefaultHasher, Hasher};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, Filesystem, SubvolumeId};
use offshoot_btrfs_format::root::RootItem;
use offshoot_btrfs_format::{ItemType, Key};
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, MemoryDevice};
use offshoot_testkit::crash::{MemberDevices, report};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::{
    self as vfs, EntryPlace, Errno, FileId, FileSystem, FileSystemMut, FileType, NewFile, Result,
    Timestamp,
};

use crate::accounts;
use crate::engine::{EAGER, ONE, OURS, SMALL_NODES, VolumeShape, volume};
use crate::judge::OutsideJudges;
use crate::plan;

const AT: Timestamp = Timestamp { secs: 1_600_000_000, nanos: 0 };
const NEW: NewFile = NewFile { permissions: 0o755, uid: 0, gid: 0, umask: None, at: AT };

#[derive(Clone, Copy, Debug)]
enum SubvolumeOp {
    Create(&'static str),
    Snapshot(&'static str, &'static str, bool),
    Delete(&'static str),
    Rename(&'static str, &'static str),
    Exchange(&'static str, &'static str),
    SetReadOnly(&'static str),
    SetDefault(&'static str),
    SetLabel(&'static str),
    File(&'static str),
    Unlink(&'static str),
    Rmdir(&'static str),
    Drop,
    Sync,
}

use SubvolumeOp::{
    Create, Delete, Drop, Exchange, File, Rename, Rmdir, SetDefault, SetLabel, SetReadOnly,
    Snapshot, Sync, Unlink,
};

/// All operations, on the volume that [`set_up`] makes.
const OPS: [SubvolumeOp; 22] = [
    Create("new"),
    Create("a/new"),
    Snapshot("a", "of-a", false),
    Snapshot("a", "a/of-itself", true),
    Snapshot("", "of-all", false),
    Snapshot("b", "of-b", false),
    Delete("b"),
    Delete("c"),
    Delete("a/in"),
    Rename("b", "a/moved"),
    // Onto the place of one that is elsewhere: onto itself.
    Rename("a/in", "b/in"),
    Exchange("a/in", "b"),
    Exchange("a/in", "a/3"),
    SetReadOnly("a"),
    SetDefault("b"),
    SetLabel("another"),
    File("a/file"),
    File("b/file"),
    Unlink("a/3"),
    Rmdir("b/in"),
    Drop,
    Sync,
];

/// The errors that an operation may cause in the next one.
const IMPOSSIBLE: [Errno; 8] = [
    Errno::NOENT,
    Errno::EXIST,
    Errno::NOTEMPTY,
    Errno::PERM,
    Errno::ROFS,
    Errno::XDEV,
    Errno::INVAL,
    Errno::ISDIR,
];

fn at(fs: &Filesystem, path: &str) -> Result<FileId> {
    let mut names = path.split('/').filter(|name| !name.is_empty());
    names.try_fold(fs.root(), |dir, name| fs.lookup(dir, name.as_bytes()))
}

fn open(devices: MemberDevices, dirty_bytes: u64) -> Result<Filesystem> {
    let options = EngineOptions { commit_interval: None, dirty_bytes, ..EngineOptions::default() };
    BtrfsVolume::open_writable(devices, &options)?.filesystem(SubvolumeId::FS)
}

impl SubvolumeOp {
    fn run(self, fs: &Filesystem) -> Result<()> {
        let split = |path: &'static str| -> Result<EntryPlace<'static>> {
            let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
            Ok(EntryPlace { dir: at(fs, dir)?, name: name.as_bytes() })
        };
        let id = |path| at(fs, path).map(|root| SubvolumeId { 0: root.dev });
        match self {
            Create(path) => fs.create_subvolume(split(path)?, &NEW).map(drop),
            Snapshot(from, to, is_read_only) => {
                fs.snapshot(id(from)?, split(to)?, is_read_only, AT).map(drop)
            }
            Delete(path) => fs.delete_subvolume(split(path)?, AT),
            Rename(from, to) => fs.rename(split(from)?, split(to)?, AT),
            Exchange(one, other) => {
                fs.rename_with(split(one)?, split(other)?, vfs::Rename::Exchange, AT)
            }
            SetReadOnly(path) => fs.volume().set_read_only(id(path)?, true, AT),
            SetDefault(path) => fs.volume().set_default_subvolume(id(path)?),
            SetLabel(label) => fs.volume().set_label(label.as_bytes()),
            File(path) => fs.create(split(path)?, &NEW).map(drop),
            Unlink(path) => fs.unlink(split(path)?, AT),
            Rmdir(path) => fs.rmdir(split(path)?, AT),
            Drop => fs.volume().drop_deleted(),
            Sync => fs.sync(),
        }
    }
}

/// A subvolume with another one in it, and two snapshots of it that were changed since.
fn set_up(fs: &Filesystem) -> Result<()> {
    Create("a").run(fs)?;
    let fill = |path: &str, from: u64| -> Result<()> {
        for number in from..from + 60 {
            let place = EntryPlace { dir: at(fs, path)?, name: &number.to_string().into_bytes() };
            let file = fs.create(place, &NEW)?;
            if number.is_multiple_of(7) {
                fs.write(file, 0, &[u8::try_from(number).expect("small"); 9000], AT)?;
            }
        }
        Ok(())
    };
    fill("a", 0)?;
    Create("a/in").run(fs)?;
    Snapshot("a", "b", false).run(fs)?;
    fill("b", 100)?;
    Snapshot("b", "c", true).run(fs)?;
    fill("a", 180)?;
    fs.sync()
}

/// Everything that the volume shows, one line each.
fn picture(fs: &Filesystem) -> Result<String> {
    let (volume, label) = (fs.volume(), fs.volume().label());
    let mut lines = format!("label {label:?}, default {}\n", volume.default_subvolume()?);
    for subvolume in fs.volume().subvolumes() {
        let subvolume = subvolume?;
        let path = subvolume.path?;
        let (id, ro) = (subvolume.id, subvolume.is_read_only);
        writeln!(lines, "{id} /{} read-only {ro}", path.escape_ascii()).expect("memory");
    }
    let mut dirs = vec![(fs.root(), String::new())];
    while let Some((dir, path)) = dirs.pop() {
        let mut entries = Vec::new();
        fs.read_dir(dir, 0, &mut |entry| {
            let name = entry.name.escape_ascii().to_string();
            entries.push((name, entry.file, entry.file_type));
            ControlFlow::Continue(())
        })?;
        for (name, file, file_type) in entries {
            let attr = fs.attr(file)?;
            let mut data = vec![0; usize::try_from(attr.size).expect("small")];
            let mut hasher = DefaultHasher::new();
            if file_type == FileType::Regular {
                fs.read(file, 0, &mut data)?;
                hasher.write(&data);
            }
            let (size, hash) = (attr.size, hasher.finish());
            let path = format!("{path}/{name}");
            writeln!(lines, "{path} {file_type:?} {size} {hash:x}").expect("memory");
            if file_type == FileType::Directory {
                dirs.push((file, path));
            }
        }
    }
    Ok(lines)
}

fn accounts(devices: MemberDevices) -> Result<()> {
    accounts::check(&BtrfsVolume::open(devices, &EngineOptions::default())?)
}

/// The deleted subvolumes that are dropped in part: up to which key each drop has come.
fn half_dropped(devices: MemberDevices) -> Result<Vec<Key>> {
    let volume = BtrfsVolume::open(devices, &EngineOptions::default())?;
    let mut found = Vec::new();
    volume.for_each_item(volume.root_tree(), Key::MIN, |key, data| {
        if key.item_type == ItemType::ROOT_ITEM {
            let item = RootItem::parse(data).expect("the item was verified");
            found.extend(Some(item.drop_progress.get()).filter(|at| at.objectid != 0));
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// One exploration: the limit of changed bytes before the engine commits by itself, the volume
/// after the set-up, and the outside judges.
struct SubvolumeExplorer<'a> {
    dirty_bytes: u64,
    base: &'a MemberDevices,
    plan: CrashPlan,
    outside: Option<&'a OutsideJudges>,
    judged_every: usize,
    states: usize,
    /// The keys up to which partly dropped subvolumes were dropped, in all states.
    half_dropped: BTreeSet<Key>,
}

impl<'a> SubvolumeExplorer<'a> {
    fn new(
        dirty_bytes: u64,
        base: &'a MemberDevices,
        plan: CrashPlan,
        outside: Option<&'a OutsideJudges>,
        judged_every: usize,
    ) -> Self {
        let (states, half_dropped) = (0, BTreeSet::new());
        Self { dirty_bytes, base, plan, outside, judged_every, states, half_dropped }
    }

    fn explore(&mut self, ops: &[SubvolumeOp]) -> std::result::Result<(), String> {
        let copy = Arc::new(MemoryDevice::over(self.base[0].clone()));
        let device = Arc::new(CrashDevice::new(copy));
        let failed = |e: offshoot_vfs::Error| e.to_string();
        let fs = open(vec![device.clone()], self.dirty_bytes).map_err(failed)?;
        let mut pictures = vec![picture(&fs).map_err(failed)?];
        for (number, op) in ops.iter().enumerate() {
            device.mark(&format!("begin {}", number + 1));
            match op.run(&fs) {
                Ok(()) => {}
                // An operation that the one before made impossible changes nothing.
                Err(error)
                    if number > 0 && IMPOSSIBLE.contains(&error.errno()) && !matches!(op, Sync) => {
                }
                Err(error) => return Err(format!("{op:?}: {error}")),
            }
            pictures.push(picture(&fs).map_err(failed)?);
            if matches!(op, Sync) {
                device.mark(&format!("kept {}", number + 1));
            }
        }
        drop(fs);
        for state in device.log().states(&self.plan) {
            let state = state.map_err(|e| e.to_string())?;
            let last = |marks: &[Arc<str>], what: &str| -> usize {
                let number = marks.iter().rev().find_map(|mark| mark.strip_prefix(what));
                number.map_or(0, |number| number.trim().parse().expect("a mark of our own"))
            };
            let kept = last(state.marks(), "kept");
            let begun =
                last(&state.marks()[..state.marks_before_earliest_cut()], "begin").max(kept);
            let what = format!("state {} ({})", state.number, state.description);
            let devices: Vec<_> = state.devices.into_iter().map(Arc::new).collect();
            let found = self.enter(&devices).map_err(|e| format!("{what}: {e}"))?;
            if !pictures[kept..=begun].contains(&found) {
                let expected = pictures[kept..=begun].join("\nor\n");
                return Err(format!("{what}, {kept} to {begun}:\n{found}\nexpected\n{expected}"));
            }
        }
        Ok(())
    }

    /// Opens a state, drops what is deleted in it, and returns what the state showed.
    fn enter(&mut self, devices: &[Arc<MemoryDevice>]) -> std::result::Result<String, String> {
        let shared = || devices.iter().map(|one| one.clone() as Arc<dyn BlockDevice>).collect();
        let failed = |what: &'static str| move |e: offshoot_vfs::Error| format!("{what}: {e}");
        let judge = self.outside.filter(|_| self.states.is_multiple_of(self.judged_every));
        self.states += 1;
        judge.map_or(Ok(()), |judge| judge.judge(devices))?;
        accounts(shared()).map_err(failed("the accounts"))?;
        self.half_dropped.extend(half_dropped(shared()).map_err(failed("the root items"))?);
        let fs = open(shared(), self.dirty_bytes).map_err(failed("opening"))?;
        let found = picture(&fs).map_err(failed("reading"))?;
        fs.volume().drop_deleted().map_err(failed("dropping"))?;
        // A subvolume number is free again only when nothing refers to it.
        Create("afterwards").run(&fs).and_then(|()| fs.sync()).map_err(failed("a change"))?;
        drop(fs);
        accounts(shared()).map_err(failed("the accounts after dropping"))?;
        judge.map_or(Ok(()), |judge| judge.judge(devices))?;
        Ok(found)
    }
}

/// A volume that `set_up` has run on.
fn base(seed: u64, shape: VolumeShape, set_up: fn(&Filesystem) -> Result<()>) -> MemberDevices {
    let base = volume(seed, shape);
    set_up(&open(base.clone(), 64 << 20).expect("it opens")).expect("there is room");
    base
}

/// Explores pairs of operations, each pair with a sync at its end.
fn explore(
    shape: VolumeShape,
    dirty_bytes: u64,
    plan: CrashPlan,
    pairs: &[(SubvolumeOp, SubvolumeOp)],
    every: usize,
) {
    let base = base(plan.seed ^ dirty_bytes, shape, set_up);
    let outside = OutsideJudges::new();
    let mut explorer = SubvolumeExplorer::new(dirty_bytes, &base, plan, outside.as_ref(), every);
    for &(first, second) in pairs {
        let ops = [first, second, Sync];
        explorer.explore(&ops).unwrap_or_else(|problem| panic!("{ops:?}: {problem}"));
    }
    report(format_args!("{shape}: {} pairs, {} states", pairs.len(), explorer.states));
    assert!(explorer.states > 0, "nothing was explored");
}

fn all_pairs() -> Vec<(SubvolumeOp, SubvolumeOp)> {
    OPS.iter().flat_map(|&first| OPS.iter().map(move |&second| (first, second))).collect()
}

#[test]
fn subvolumes() {
    let seed = seed_of_run();
    let (mut random, all) = (Random::new(seed), all_pairs());
    let mut some = |count: usize| -> Vec<_> {
        let mut number = || usize::try_from(random.below(all.len() as u64)).expect("an index");
        (0..count).map(|_| all[number()]).collect()
    };
    explore(ONE, OURS.dirty_bytes, plan(seed), &some(12), 200);
    explore(SMALL_NODES, OURS.dirty_bytes, plan(seed), &some(12), 200);
    explore(SMALL_NODES, EAGER.dirty_bytes, plan(seed), &some(6), 300);
}

/// A subvolume that is dropped in several steps. Some of its blocks are its own, and others it
/// shares with a snapshot. Some of the shared ones name it as their owner, because it wrote them.
fn set_up_large(fs: &Filesystem) -> Result<()> {
    let fill = |path: &str, numbers: Range<u32>| -> Result<()> {
        let dir = at(fs, path)?;
        for number in numbers {
            let name = format!("{number:05}").into_bytes();
            let file = fs.create(EntryPlace { dir, name: &name }, &NEW)?;
            if number.is_multiple_of(9) {
                fs.write(file, 0, &[7; 5000], AT)?;
            }
        }
        Ok(())
    };
    Create("a").run(fs)?;
    fill("a", 0..150)?;
    fs.sync()?;
    Snapshot("a", "b", false).run(fs)?;
    // Blocks written after the snapshot belong to this subvolume, and the next snapshot shares
    // them.
    fill("b", 150..300)?;
    fs.sync()?;
    Snapshot("b", "c", false).run(fs)?;
    fill("b", 300..450)?;
    fs.sync()
}

/// The power is cut between the steps of dropping a large subvolume, and within them. The engine
/// that opens the volume next drops the rest.
#[test]
fn a_drop_that_is_cut_between_its_steps() {
    let plan = CrashPlan { exhaustive_limit: 2, samples_per_epoch: 4, ..plan(seed_of_run()) };
    let base = base(plan.seed, SMALL_NODES, set_up_large);
    let outside = OutsideJudges::new();
    // A step changes one tree block, which is already more than this limit.
    let dirty_bytes = u64::from(SMALL_NODES.node_size) / 2;
    let mut explorer = SubvolumeExplorer::new(dirty_bytes, &base, plan, outside.as_ref(), 40);
    let ops = [Delete("b"), Drop, Sync];
    explorer.explore(&ops).unwrap_or_else(|problem| panic!("{ops:?}: {problem}"));
    let (states, places) = (explorer.states, explorer.half_dropped.len());
    report(format_args!("{states} states, dropped up to {places} places"));
    assert!(places > 2, "it is dropped in one step: {places} places");
}

/// All pairs, on all shapes.
pub(crate) fn campaign(plan: CrashPlan, every: usize) {
    for shape in [ONE, SMALL_NODES] {
        for dirty_bytes in [OURS.dirty_bytes, EAGER.dirty_bytes] {
            explore(shape, dirty_bytes, plan, &all_pairs(), every);
        }
    }
}
