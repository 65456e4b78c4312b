//! Names on volumes of `mkfs.xfs` change at random, and a model says what each call does. Our own
//! reader, the checks and the kernel find what the model has.

mod cost;
mod cuts;
mod damage;
mod details;
mod full;
mod inherit;
mod model;
mod seen;
mod threads;
mod times;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Attr, Errno, Error, FileSystem, FileType, NewFile, Rename, Timestamp};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::geometry::XfsLayout;

use super::{NamePlace, XfsNameState, XfsNames, XfsNewKind};
use crate::defer::IntentIds;
use crate::inode::file_id;
use crate::log::XfsLogOptions;
use crate::test_volumes::{engine_on, engine_with};
use crate::trans::XfsTransactions;
use crate::{XfsOptions, XfsVolume, check_xfs};
use model::{NameTree, TreeNode};

const NANOS: u32 = 7;

/// A moment, in seconds.
fn at(secs: i64) -> Timestamp {
    Timestamp { secs, nanos: NANOS }
}

fn new_file(permissions: u32, secs: i64) -> NewFile {
    NewFile { permissions, uid: 11, gid: 12, umask: None, at: at(secs) }
}

/// A volume, its engine, and what changes its names.
struct NameBench {
    disk: XfsDisk,
    engine: XfsTransactions,
    ids: IntentIds,
    state: XfsNameState,
    kernel_says: Vec<&'static str>,
}

impl NameBench {
    fn make(mib: u64, options: &str) -> Option<Self> {
        let disk = XfsDisk::create(&judges::require()?, mib);
        disk.mkfs(options);
        Some(Self::on(disk, options))
    }

    fn on(disk: XfsDisk, options: &str) -> Self {
        let device = disk.writable_device();
        Self::over(disk, device, options)
    }

    fn over(disk: XfsDisk, device: Arc<dyn BlockDevice>, options: &str) -> Self {
        Self::with(disk, engine_on(device), options)
    }

    /// One whose log pushes each commit, so that cuts fall between the steps of a chain.
    fn pushed(disk: XfsDisk, device: Arc<dyn BlockDevice>, options: &str) -> Self {
        let log_options = XfsLogOptions { context_bytes: Some(1), ..XfsLogOptions::default() };
        Self::with(disk, engine_with(device, &log_options), options)
    }

    fn with(disk: XfsDisk, engine: XfsTransactions, options: &str) -> Self {
        let is_large = ["-b size=65536", "-b size=16384"].iter().any(|size| options.contains(size));
        let kernel_says = if is_large { vec![LARGE_BLOCKS] } else { vec![] };
        let (ids, state) = (IntentIds::default(), XfsNameState::default());
        Self { disk, engine, ids, state, kernel_says }
    }

    fn names(&self) -> XfsNames<'_> {
        XfsNames::new(&self.engine, &self.ids, &self.state)
    }

    fn root(&self) -> Ino {
        self.engine.superblock().root().unwrap()
    }

    /// What our reader finds in the log and on the device now.
    fn read(&self) -> Arc<XfsVolume> {
        self.engine.log().force_all().unwrap();
        XfsVolume::open(self.disk.copy().device(), &XfsOptions::default()).unwrap()
    }

    fn tree(&self) -> NameTree {
        NameTree::read(&*self.read())
    }

    /// Cuts the log. The kernel recovers one copy and we another; both find the tree, and nothing
    /// else.
    fn assert_cut_recovers(&self, tree: &NameTree) {
        self.engine.log().force_all().unwrap();
        let cut = self.disk.copy();
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        tree.assert_kernel_finds(cut.mount("nouuid", &recovering).path());
        cut.assert_checks();
        let cut = self.disk.copy();
        XfsVolume::recover(&cut.writable_device(), &XfsOptions::default()).unwrap();
        cut.assert_checks();
        assert_clean(&cut);
        assert_eq!(
            NameTree::read(&*XfsVolume::open(cut.device(), &XfsOptions::default()).unwrap()),
            *tree
        );
    }

    /// All judges find the tree after a clean unmount.
    fn assert_unmounts(self, tree: &NameTree) -> XfsDisk {
        let Self { disk, engine, kernel_says, .. } = self;
        engine.unmount().unwrap();
        disk.assert_checks();
        assert_clean(&disk);
        let reader = XfsVolume::open(disk.device(), &XfsOptions::default()).unwrap();
        assert_eq!(NameTree::read(&*reader), *tree);
        let mount = disk.mount("", &kernel_says);
        tree.assert_kernel_finds(mount.path());
        drop(mount);
        disk
    }
}

fn assert_clean(disk: &XfsDisk) {
    let found = check_xfs(&disk.device(), &XfsOptions::default()).unwrap();
    assert!(found.findings.is_empty(), "{:#?}", found.findings);
}

/// Random changes of names, with a model of them.
struct NameChurn<'b> {
    bench: &'b NameBench,
    tree: NameTree,
    random: Random,
    clock: i64,
    /// Files without names that are still open.
    open: Vec<(Ino, TreeNode)>,
}

impl<'b> NameChurn<'b> {
    fn new(bench: &'b NameBench, seed: u64) -> Self {
        let (tree, random) = (bench.tree(), Random::new(seed));
        Self { bench, tree, random, clock: 1_700_000_000, open: Vec::new() }
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.random.below(end as u64)).unwrap()
    }

    fn pick(&mut self, of: &[Ino]) -> Ino {
        of[self.below(of.len())]
    }

    fn dir(&mut self) -> Ino {
        let all = self.tree.directories();
        self.pick(&all)
    }

    /// A name: one of a few of each length, or one that is there.
    fn name(&mut self, dir: Ino) -> Vec<u8> {
        let there: Vec<_> = self.tree.nodes[&dir].names.keys().cloned().collect();
        if !there.is_empty() && self.below(3) > 0 {
            return there[self.below(there.len())].clone();
        }
        let number = self.below(60);
        let len = match number % 7 {
            0 => 200 + number % 56,
            1 => 60,
            _ => 4 + number % 20,
        };
        let mut name = format!("{number:03}").into_bytes();
        name.resize(len, b'n');
        name
    }

    fn kind<'a>(&mut self, target: &'a [u8]) -> (XfsNewKind<'a>, FileType) {
        let kind = match self.below(10) {
            0..3 => XfsNewKind::Directory,
            3 => XfsNewKind::Symlink(target),
            4 => XfsNewKind::Node(FileType::CharDevice, (300, 70_000)),
            5 => XfsNewKind::Node(FileType::BlockDevice, (1, 3)),
            6 => XfsNewKind::Node(FileType::Fifo, (0, 0)),
            7 => XfsNewKind::Node(FileType::Socket, (0, 0)),
            _ => XfsNewKind::Regular,
        };
        (kind, kind.file_type())
    }

    fn target(&mut self) -> Vec<u8> {
        let len = [1, 192, 193, 296, 297, 336, 337, 900, 968, 969, 1023][self.below(11)];
        (0..len).map(|number| b'a' + u8::try_from(number % 23).unwrap()).collect()
    }

    fn create(&mut self) {
        let dir = self.dir();
        let name = self.name(dir);
        let target = self.target();
        let (kind, _) = self.kind(&target);
        let permissions = u32::try_from(self.below(0o10_000)).unwrap();
        let new = new_file(permissions, self.clock);
        let made = self.bench.names().create(NamePlace { dir, name: &name }, kind, &new);
        let expected = self.tree.may_add(dir, &name);
        assert_eq!(made.as_ref().map(drop).map_err(Error::errno), expected, "{made:?}");
        if let Ok(ino) = made {
            self.tree.create((dir, &name), ino, TreeNode::new(kind, &new));
        }
    }

    fn link(&mut self) {
        let dir = self.dir();
        let name = self.name(dir);
        let all = self.tree.all();
        let ino = self.pick(&all);
        let done = self.bench.names().link(ino, NamePlace { dir, name: &name }, at(self.clock));
        let is_directory = self.tree.nodes[&ino].is_directory();
        let expected = self.tree.may_add(dir, &name);
        let expected = expected.and(if is_directory { Err(Errno::PERM) } else { Ok(()) });
        assert_eq!(done.map_err(|error| error.errno()), expected);
        if expected.is_ok() {
            self.tree.link((dir, &name), ino, self.clock);
        }
    }

    /// What became of a file whose last name is gone: it is freed, or stays open for a while.
    fn lose(&mut self, lost: Option<Ino>) {
        assert_eq!(lost.is_some(), self.tree.lost.is_some());
        let (Some(ino), Some((expected, node))) = (lost, self.tree.lost.take()) else { return };
        assert_eq!(ino, expected);
        self.open.push((ino, node));
        self.close(5);
    }

    /// Frees open files without names until `most` are left.
    fn close(&mut self, most: usize) {
        while self.open.len() > most {
            let index = self.below(self.open.len());
            let (ino, _) = self.open.swap_remove(index);
            self.bench.names().inactivate(ino).unwrap();
        }
    }

    fn remove(&mut self) {
        let dir = self.dir();
        let name = self.name(dir);
        let place = NamePlace { dir, name: &name };
        let names = self.bench.names();
        let is_rmdir = self.below(2) == 0;
        let done = if is_rmdir {
            names.rmdir(place, at(self.clock)).map(Some)
        } else {
            names.unlink(place, at(self.clock))
        };
        let expected = self.tree.may_remove(dir, &name, is_rmdir);
        assert_eq!(done.as_ref().map(drop).map_err(Error::errno), expected, "{done:?}");
        if let Ok(lost) = done {
            self.tree.remove((dir, &name), self.clock);
            self.lose(lost);
        }
    }

    fn rename(&mut self) {
        let dirs = [self.dir(), self.dir()];
        let [from, to] = dirs.map(|dir| (dir, self.name(dir)));
        let how = match self.below(8) {
            0 => Rename::NoReplace,
            1..3 => Rename::Exchange,
            3 => Rename::Whiteout { new: new_file(0, self.clock), replaces: true },
            4 => Rename::Whiteout { new: new_file(0, self.clock), replaces: false },
            _ => Rename::Replace,
        };
        let [from, to] = [&from, &to].map(|(dir, name)| NamePlace { dir: *dir, name });
        let done = self.bench.names().rename(from, to, how, at(self.clock));
        let expected = self.tree.may_rename(from, to, how);
        let errno = done.as_ref().map(drop).map_err(Error::errno);
        assert_eq!(errno, expected, "{from:?} {to:?} {how:?} {done:?}");
        if let Ok(lost) = done {
            self.tree.rename(from, to, how, self.clock);
            let has_parents = self.bench.engine.geometry().layout.contains(XfsLayout::PARENTS);
            if how == Rename::Exchange && has_parents {
                self.tree.touch_exchanged(from, to, self.clock);
            }
            if self.tree.wants_whiteout.take().is_some() {
                let found = self.bench.names().find(from).unwrap();
                let node = TreeNode::new(
                    XfsNewKind::Node(FileType::CharDevice, (0, 0)),
                    &new_file(0, self.clock),
                );
                self.tree.add_whiteout(from, found.0, node);
            }
            self.lose(lost);
        }
    }

    fn unnamed(&mut self) {
        let dir = self.dir();
        let new = new_file(0o640, self.clock);
        let names = self.bench.names();
        let kind = XfsNewKind::Regular;
        let ino = names.create_unnamed(dir, kind, &new).unwrap();
        let node = TreeNode { links: 0, ..TreeNode::new(kind, &new) };
        if self.below(2) == 0 {
            self.open.push((ino, node));
            self.close(5);
            return;
        }
        let dir = self.dir();
        let name = self.name(dir);
        let place = NamePlace { dir, name: &name };
        assert!(names.link(ino, place, at(self.clock)).is_err());
        let done = names.link_unnamed(ino, place, at(self.clock));
        let expected = self.tree.may_add(dir, &name);
        assert_eq!(done.map_err(|error| error.errno()), expected);
        if expected.is_ok() {
            self.tree.nodes.insert(ino, node);
            self.tree.link((dir, &name), ino, self.clock);
        } else {
            names.inactivate(ino).unwrap();
        }
    }

    fn step(&mut self) {
        self.clock += 1;
        match self.below(20) {
            0..7 => self.create(),
            7 => self.link(),
            8..12 => self.remove(),
            12..18 => self.rename(),
            _ => self.unnamed(),
        }
        if self.below(400) == 0 {
            self.bench.engine.log().push_tail().unwrap();
        }
    }

    /// Removes all names but the root.
    fn remove_all(&mut self) {
        self.close(0);
        loop {
            let names = self.tree.removable();
            if names.is_empty() {
                return;
            }
            for (dir, name, is_directory) in names {
                self.clock += 1;
                let place = NamePlace { dir, name: &name };
                let names = self.bench.names();
                let lost = if is_directory {
                    Some(names.rmdir(place, at(self.clock)).unwrap())
                } else {
                    names.unlink(place, at(self.clock)).unwrap()
                };
                self.tree.remove((dir, &name), self.clock);
                self.lose(lost);
            }
            self.close(0);
        }
    }
}

/// Changes names at random, with a cut in the middle.
fn churn(options: &str, steps: usize) {
    let Some(bench) = NameBench::make(1 << 10, options) else { return };
    let mut churn = NameChurn::new(&bench, seed_of_run());
    for _ in 0..steps {
        churn.step();
    }
    assert_eq!(bench.tree(), churn.tree);
    bench.assert_cut_recovers(&churn.tree);
    for _ in 0..steps / 4 {
        churn.step();
    }
    churn.remove_all();
    for _ in 0..steps / 4 {
        churn.step();
    }
    churn.close(0);
    let tree = churn.tree;
    drop(bench.assert_unmounts(&tree));
}

#[test]
fn judges_find_the_tree_of_the_model() {
    churn("", 800);
}

#[test]
fn judges_find_the_tree_of_the_model_with_parent_pointers() {
    churn("-n parent=1", 800);
}

#[test]
fn judges_find_the_tree_of_the_model_in_small_blocks_with_parent_pointers() {
    churn("-b size=1024 -n parent=1", 800);
}

#[test]
fn judges_find_the_tree_of_the_model_in_large_directory_blocks() {
    churn("-n size=65536", 500);
}

#[test]
fn judges_find_the_tree_of_the_model_without_free_inode_trees() {
    churn("-m finobt=0,inobtcount=0,rmapbt=0,reflink=0 -i sparse=0,nrext64=0", 800);
}

#[test]
fn judges_find_the_tree_of_the_model_in_large_blocks() {
    churn("-b size=65536 -n parent=1", 400);
}
