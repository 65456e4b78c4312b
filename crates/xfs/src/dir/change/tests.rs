//! Directories that the kernel has made, changed by transactions of ours. The kernel, our own
//! reader and the checks find what a model says.

mod attributes;
mod cuts;
mod damage;
mod forms;
mod full;
mod hostile;
mod one_hash;
mod room;
mod seen;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::disk::{LARGE_BLOCKS, RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges;
use offshoot_vfs::{Errno, FileId, FileSystem, Result};
use offshoot_xfs_format::Ino;
use offshoot_xfs_format::da::DaKind;
use offshoot_xfs_format::dir::file_type;
use rustix::fs::{CWD, FileType, Mode};

use super::{
    ChangedDirectory, DirectoryForm, XfsEntryTarget, add_name, find_name, is_empty, make_empty,
    most_blocks_to_add, most_blocks_to_remove, remove_name, replace_name, set_parent,
};
use crate::defer::{DeferredChain, DeferredWork, IntentIds};
use crate::inode::SPACE;
use crate::test_volumes::engine;
use crate::trans::{XfsTransaction, XfsTransactionKind as Kind, XfsTransactions};
use crate::{XfsOptions, XfsVolume, check_xfs};

/// The files that names lead to, all in one directory.
const FILES: &str = "files";

/// A file that names lead to.
struct NamedFile {
    ino: Ino,
    file_type: u8,
}

/// A directory, and the files that its names should lead to.
struct NamedDirectory {
    path: String,
    ino: Ino,
    names: BTreeMap<Vec<u8>, usize>,
}

/// A volume with directories, and a model of their names.
struct NamedVolume {
    disk: XfsDisk,
    ids: IntentIds,
    files: Vec<NamedFile>,
    directories: Vec<NamedDirectory>,
    random: Random,
    kernel_says: Vec<&'static str>,
}

/// What a test does to names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XfsNameChange {
    Add(usize),
    Replace(usize),
    Remove,
}

fn make_file(path: &Path, number: usize) {
    match number % 5 {
        0 => std::os::unix::fs::symlink("target", path).unwrap(),
        1 => rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap(),
        2 => {
            let kind = FileType::CharacterDevice;
            rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), 0x0103).unwrap();
        }
        _ => drop(std::fs::File::create(path).unwrap()),
    }
}

fn type_of(path: &Path) -> u8 {
    let kind = path.symlink_metadata().unwrap().file_type();
    if kind.is_symlink() {
        file_type::SYMLINK
    } else if kind.is_fifo() {
        file_type::FIFO
    } else if kind.is_char_device() {
        file_type::CHRDEV
    } else {
        file_type::REG_FILE
    }
}

impl NamedVolume {
    fn make(mib: u64, options: &str, directories: usize, seed: u64) -> Option<Self> {
        let disk = XfsDisk::create(&judges::require()?, mib);
        disk.mkfs(options);
        let is_large = ["-b size=65536", "-b size=16384"].iter().any(|size| options.contains(size));
        let kernel_says = if is_large { vec![LARGE_BLOCKS] } else { vec![] };
        let mount = disk.mount("", &kernel_says);
        std::fs::create_dir(mount.path().join(FILES)).unwrap();
        let file = |number| {
            let path = mount.path().join(FILES).join(format!("file {number}"));
            make_file(&path, number);
            NamedFile { ino: Ino(XfsDisk::ino(&path)), file_type: type_of(&path) }
        };
        let files = (0..20).map(file).collect();
        let directory = |number| {
            let path = format!("directory {number}");
            std::fs::create_dir(mount.path().join(&path)).unwrap();
            let ino = Ino(XfsDisk::ino(&mount.path().join(&path)));
            NamedDirectory { path, ino, names: BTreeMap::new() }
        };
        let directories = (0..directories).map(directory).collect();
        drop(mount);
        let random = Random::new(seed);
        Some(Self { disk, ids: IntentIds::default(), files, directories, random, kernel_says })
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.random.below(end as u64)).unwrap()
    }

    /// A name: one of `many`, of each length.
    fn name(&mut self, many: usize) -> Vec<u8> {
        let number = self.below(many);
        let len = match number % 20 {
            0 => 1 + number / 20 % 255,
            1..4 => 200 + number % 56,
            _ => 5 + number % 30,
        };
        // Any bytes but a slash and a NUL byte.
        let bytes = Random::new(number as u64).bytes(len);
        let mut name: Vec<_> = bytes
            .into_iter()
            .map(|byte| if matches!(byte, 0 | b'/') { b'+' } else { byte })
            .collect();
        let digits = number.to_string();
        let digits = &digits.as_bytes()[..digits.len().min(len)];
        name[..digits.len()].copy_from_slice(digits);
        name
    }

    /// Begins a transaction for a change.
    fn begin(engine: &XfsTransactions, change: XfsNameChange) -> Result<XfsTransaction<'_>> {
        match change {
            XfsNameChange::Add(_) => engine.begin(Kind::Link, most_blocks_to_add(engine)),
            XfsNameChange::Replace(_) => engine.begin(Kind::Rename, most_blocks_to_add(engine)),
            XfsNameChange::Remove => {
                let begun = engine.begin(Kind::Remove, most_blocks_to_remove(engine));
                // In a full volume names are removed without a promise.
                begun.or_else(|_| engine.begin(Kind::Remove, 0))
            }
        }
    }

    /// Makes a change of a name in a transaction, which is not committed, with the links of files.
    fn perform(
        &self,
        t: &mut XfsTransaction<'_>,
        index: usize,
        name: &[u8],
        change: XfsNameChange,
    ) -> Result<Vec<DeferredWork>> {
        let directory = &self.directories[index];
        let (dir, old) = (directory.ino, directory.names.get(name).copied());
        let target = |file: usize| (self.files[file].ino, self.files[file].file_type);
        let found = find_name(t, dir, name)?;
        assert_eq!(found, old.map(target));
        let (work, new) = match change {
            XfsNameChange::Add(file) => (add_name(t, dir, name, target(file))?, Some(file)),
            XfsNameChange::Replace(file) => (replace_name(t, dir, name, target(file))?, Some(file)),
            XfsNameChange::Remove => (remove_name(t, dir, name)?, None),
        };
        for (file, links) in [(old, -1), (new, 1)] {
            if let Some(file) = file {
                let core = t.inode(self.files[file].ino)?.core_mut();
                core.nlink = core.nlink.get().checked_add_signed(links).unwrap().into();
            }
        }
        assert_eq!(find_name(t, dir, name)?, new.map(target));
        Ok(work)
    }

    /// Makes a change. The model has it then.
    fn try_change(
        &mut self,
        engine: &XfsTransactions,
        index: usize,
        name: &[u8],
        change: XfsNameChange,
    ) -> Result<()> {
        let free = |engine: &XfsTransactions| engine.counters().counts().free_blocks;
        let before = free(engine);
        let mut t = Self::begin(engine, change)?;
        let work = self.perform(&mut t, index, name, change)?;
        let mut chain = DeferredChain::new(&self.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[])?;
        assert!(before.saturating_sub(free(engine)) <= most_blocks_to_add(engine));
        let names = &mut self.directories[index].names;
        match change {
            XfsNameChange::Add(file) | XfsNameChange::Replace(file) => {
                names.insert(name.to_vec(), file)
            }
            XfsNameChange::Remove => names.remove(name),
        };
        Ok(())
    }

    /// Lets the kernel add names of one file to the first directory.
    fn let_kernel_add(&mut self, names: Vec<Vec<u8>>) {
        let mount = self.disk.mount("", &self.kernel_says);
        let directory = mount.path().join(&self.directories[0].path);
        let file = mount.path().join(FILES).join("file 3");
        for name in names {
            std::fs::hard_link(&file, directory.join(OsStr::from_bytes(&name))).unwrap();
            self.directories[0].names.insert(name, 3);
        }
    }

    /// Removes a name of the first directory, and asks nothing before and behind it.
    fn remove_quickly(&mut self, engine: &XfsTransactions, name: &[u8]) {
        let file = self.directories[0].names.remove(name).unwrap();
        let mut t = engine.begin(Kind::Remove, most_blocks_to_remove(engine)).unwrap();
        let work = remove_name(&mut t, self.directories[0].ino, name).unwrap();
        let core = t.inode(self.files[file].ino).unwrap().core_mut();
        core.nlink = (core.nlink.get() - 1).into();
        let mut chain = DeferredChain::new(&self.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[]).unwrap();
    }

    fn add(&mut self, engine: &XfsTransactions, index: usize, name: &[u8]) {
        let file = self.below(self.files.len());
        self.try_change(engine, index, name, XfsNameChange::Add(file)).unwrap();
    }

    fn remove(&mut self, engine: &XfsTransactions, index: usize, name: &[u8]) {
        self.try_change(engine, index, name, XfsNameChange::Remove).unwrap();
    }

    /// Adds, removes or replaces a random name in a random directory.
    fn step(&mut self, engine: &XfsTransactions, many: usize, add_of_ten: usize) {
        let index = self.below(self.directories.len());
        // The directories have few names, and many.
        let many = [8, 40, 150, many][index % 4];
        let name = self.name(many);
        let file = self.below(self.files.len());
        let is_there = self.directories[index].names.contains_key(&name);
        let change = match (is_there, self.below(10) < add_of_ten) {
            (true, true) => XfsNameChange::Replace(file),
            (false, true) => XfsNameChange::Add(file),
            (true, false) => XfsNameChange::Remove,
            (false, false) => return,
        };
        self.try_change(engine, index, &name, change).unwrap();
        if self.below(300) == 0 {
            engine.log().force_all().unwrap();
        }
        if self.below(1000) == 0 {
            engine.log().push_tail().unwrap();
        }
    }

    fn remove_all(&mut self, engine: &XfsTransactions, index: usize) {
        let mut names: Vec<_> = self.directories[index].names.keys().cloned().collect();
        names.sort_by_cached_key(|_| self.random.number());
        for name in names {
            self.remove(engine, index, &name);
        }
    }

    /// The form of a directory: `None` in the inode, else the kind of its first block or its root.
    fn form(&self, engine: &XfsTransactions, index: usize) -> Option<DaKind> {
        let mut t = engine.begin(Kind::ChangeInode, 0).unwrap();
        let mut directory = ChangedDirectory::new(&mut t, self.directories[index].ino).unwrap();
        match directory.form().unwrap() {
            DirectoryForm::Short(_) => None,
            DirectoryForm::Block(_) => Some(DaKind::DirBlock),
            DirectoryForm::Tree => {
                let root = directory.blocks.root();
                let bytes = directory.blocks.copy(root).unwrap();
                DaKind::of_directory(engine.geometry(), &bytes)
            }
        }
    }

    /// What our reader finds in the log and on the device.
    fn assert_we_find(&self, engine: &XfsTransactions) {
        engine.log().force_all().unwrap();
        let copy = self.disk.copy();
        self.assert_reader_finds(&XfsVolume::open(copy.device(), &XfsOptions::default()).unwrap());
    }

    fn assert_reader_finds(&self, volume: &XfsVolume) {
        for directory in &self.directories {
            let dir = FileId { dev: SPACE, ino: directory.ino.0 };
            let mut found = BTreeMap::new();
            let mut visit = |entry: offshoot_vfs::DirEntry<'_>| {
                let before = found.insert(entry.name.to_vec(), entry.file.ino);
                assert!(before.is_none(), "{} is listed twice", entry.name.escape_ascii());
                ControlFlow::Continue(())
            };
            volume.read_dir(dir, 0, &mut visit).unwrap();
            assert!(found == self.numbers(directory), "{}", directory.path);
            for (name, &ino) in found.iter().step_by(7) {
                assert_eq!(volume.lookup(dir, name).unwrap().ino, ino);
            }
        }
    }

    /// The names of the model, with the numbers of their files.
    fn numbers(&self, directory: &NamedDirectory) -> BTreeMap<Vec<u8>, u64> {
        let number = |(name, file): (&Vec<u8>, &usize)| (name.clone(), self.files[*file].ino.0);
        directory.names.iter().map(number).collect()
    }

    fn assert_kernel_finds(&self, root: &Path) {
        for directory in &self.directories {
            let path = root.join(&directory.path);
            let list = std::fs::read_dir(&path).unwrap().map(|entry| {
                let entry = entry.unwrap();
                let ino = std::os::unix::fs::DirEntryExt::ino(&entry);
                (entry.file_name().as_bytes().to_vec(), ino)
            });
            assert!(list.collect::<BTreeMap<_, _>>() == self.numbers(directory), "{path:?}");
            for (name, file) in directory.names.iter().step_by(5) {
                let found = path.join(OsStr::from_bytes(name)).symlink_metadata().unwrap();
                assert_eq!(found.ino(), self.files[*file].ino.0);
            }
        }
    }

    /// Cuts the log. The kernel recovers it, and finds what the model says.
    fn assert_cut_recovers(&self, engine: &XfsTransactions) {
        engine.log().force_all().unwrap();
        let cut = self.disk.copy();
        let recovering = [&self.kernel_says[..], &[RECOVERY]].concat();
        self.assert_kernel_finds(cut.mount("nouuid", &recovering).path());
        cut.assert_checks();
    }

    /// Our reader, our check, `xfs_repair` and the kernel find what the model says, after a clean
    /// unmount. The kernel removes all names afterwards.
    fn assert_unmounts(self, engine: XfsTransactions) {
        engine.unmount().unwrap();
        self.disk.assert_checks();
        let found = check_xfs(&self.disk.device(), &XfsOptions::default()).unwrap();
        assert!(found.findings.is_empty(), "{:#?}", found.findings);
        self.assert_reader_finds(
            &XfsVolume::open(self.disk.device(), &XfsOptions::default()).unwrap(),
        );
        let mount = self.disk.mount("", &self.kernel_says);
        self.assert_kernel_finds(mount.path());
        // The kernel goes on in the forms that we have left.
        for directory in &self.directories {
            let path = mount.path().join(&directory.path);
            for (number, name) in directory.names.keys().enumerate() {
                let name = path.join(OsStr::from_bytes(name));
                if number.is_multiple_of(3) {
                    let other = path.join(format!("another name {number}"));
                    std::fs::rename(&name, other).unwrap();
                } else {
                    std::fs::remove_file(name).unwrap();
                }
            }
        }
        drop(mount);
        self.disk.assert_checks();
        let mount = self.disk.mount("", &self.kernel_says);
        for directory in &self.directories {
            std::fs::remove_dir_all(mount.path().join(&directory.path)).unwrap();
        }
        drop(mount);
        self.disk.assert_checks();
    }
}

/// Grows and shrinks directories. After each batch our reader lists the model.
fn churn(options: &str, steps: usize) {
    let Some(mut volume) = NamedVolume::make(1 << 10, options, 4, seed_of_run()) else { return };
    let engine = engine(&volume.disk);
    for (batch, add_of_ten) in [8, 2, 9].into_iter().enumerate() {
        for _ in 0..steps {
            volume.step(&engine, steps, add_of_ten);
        }
        volume.assert_we_find(&engine);
        if batch == 1 {
            volume.assert_cut_recovers(&engine);
        }
    }
    volume.remove_all(&engine, 2);
    assert_eq!(volume.form(&engine, 2), None);
    volume.assert_unmounts(engine);
}

#[test]
fn judges_find_the_names_of_the_model() {
    churn("", 2500);
}

#[test]
fn judges_find_the_names_of_the_model_in_directory_blocks_of_four_small_ones() {
    churn("-b size=1024", 2500);
}

#[test]
fn judges_find_the_names_of_the_model_in_large_directory_blocks() {
    churn("-n size=65536", 800);
}

#[test]
fn judges_find_the_names_of_the_model_in_large_blocks() {
    churn("-b size=65536", 600);
}

#[test]
fn judges_find_the_names_of_the_model_in_large_inodes_without_reverse_map() {
    churn("-i size=2048,nrext64=0 -m rmapbt=0,reflink=0", 1500);
}
