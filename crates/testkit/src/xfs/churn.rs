//! Random changes of a mounted volume, so that its log holds every kind of item.
//!
//! [`churn`] adds and removes: files of several extents, directories of every form, attributes of
//! every form, links of both kinds, clones. What it removes leaves cancelled buffers in the log.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FallocateFlags, FileType, Mode, XattrFlags, fallocate};

use crate::random::Random;

/// What a churn may do besides.
#[derive(Clone, Copy, Debug)]
pub struct ChurnPlan {
    /// Clone files. The kernel stages extents for writes to them, which a crash leaves behind.
    pub has_clones: bool,
    /// Remove files and directories. The kernel frees their inodes a little later.
    pub has_removals: bool,
}

/// The files and directories that a churn has made and not removed.
#[derive(Debug)]
struct ChurnedTree {
    dirs: Vec<PathBuf>,
    files: Vec<PathBuf>,
    plan: ChurnPlan,
    made: u64,
}

/// Does `steps` random changes below the directory `root`, which is new.
pub fn churn(root: &Path, plan: ChurnPlan, steps: u64, random: &mut Random) {
    let mut tree = ChurnedTree { dirs: vec![root.to_owned()], files: Vec::new(), plan, made: 0 };
    for _ in 0..steps {
        tree.step(random);
    }
}

impl ChurnedTree {
    fn new_path(&mut self, random: &mut Random) -> PathBuf {
        self.made += 1;
        let len = usize::try_from(random.below(60)).expect("small");
        let name = format!("{}-{}", self.made, "name".repeat(16).get(..len).unwrap_or_default());
        pick(&self.dirs, random).expect("the root").join(name)
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(20) {
            0..=5 => self.add_file(random),
            6 => self.add_directory(random),
            7 => self.add_link(random),
            8..=9 => self.set_attribute(random),
            10..=11 => self.rewrite(random),
            12 => self.punch(random),
            13 if self.plan.has_clones => self.clone_file(random),
            14 => self.rename(random),
            15..=17 if self.plan.has_removals => self.remove(random),
            18 if self.plan.has_removals => self.remove_directory(random),
            _ => self.sync_file(random),
        }
    }

    fn add_file(&mut self, random: &mut Random) {
        let path = self.new_path(random);
        let len = [0, 30, 5000, 70_000][usize::try_from(random.below(4)).expect("small")];
        fs::write(&path, random.bytes(len)).expect("a file");
        if random.below(8) == 0 {
            let node = self.new_path(random);
            let mode = Mode::from_raw_mode(0o640);
            rustix::fs::mknodat(CWD, &node, FileType::CharacterDevice, mode, 0x0103)
                .expect("a node");
        }
        self.files.push(path);
    }

    /// A directory, of any form.
    fn add_directory(&mut self, random: &mut Random) {
        let dir = self.new_path(random);
        fs::create_dir(&dir).expect("a directory");
        let count = [0, 3, 40, 400, 1500][usize::try_from(random.below(5)).expect("small")];
        for number in 0..count {
            let file = dir.join(format!("a name with the number {number}"));
            File::create(&file).expect("a file");
            if number % 10 == 0 {
                self.files.push(file);
            }
        }
        self.dirs.push(dir);
    }

    fn add_link(&mut self, random: &mut Random) {
        let path = self.new_path(random);
        let Some(file) = pick(&self.files, random) else { return };
        if random.below(2) == 0 {
            fs::hard_link(file, path).expect("a hard link");
            return;
        }
        let len = [10, 200, 1000][usize::try_from(random.below(3)).expect("small")];
        symlink("target/".repeat(200).get(..len).unwrap_or_default(), path).expect("a link");
    }

    fn set_attribute(&mut self, random: &mut Random) {
        let Some(file) = pick(&self.files, random) else { return };
        let len = [8, 100, 800, 3000, 20_000][usize::try_from(random.below(5)).expect("small")];
        for _ in 0..=random.below(6) {
            let name = format!("user.number.{}", random.below(20));
            let value = random.bytes(len);
            rustix::fs::lsetxattr(file, &*name, &value, XattrFlags::empty()).expect("a value");
        }
        if random.below(4) == 0 {
            let name = format!("user.number.{}", random.below(20));
            let _ = rustix::fs::lremovexattr(file, &*name);
        }
    }

    /// Changes parts of a file, which makes extents of it, and shortens it at times.
    fn rewrite(&mut self, random: &mut Random) {
        let Some(path) = pick(&self.files, random) else { return };
        let file = File::options().write(true).open(path).expect("a file");
        for _ in 0..random.below(8) {
            let at = random.below(64) * 16_384;
            file.write_all_at(&random.bytes(3000), at).expect("a write");
        }
        match random.below(4) {
            0 => file.set_len(random.below(100_000)).expect("a length"),
            1 => file.sync_all().expect("a sync"),
            _ => {}
        }
    }

    fn punch(&mut self, random: &mut Random) {
        let Some(path) = pick(&self.files, random) else { return };
        let file = File::options().write(true).open(path).expect("a file");
        let (at, len) = (random.below(16) * 4096, 4096 * (1 + random.below(8)));
        let flags = match random.below(3) {
            0 => FallocateFlags::empty(),
            1 => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
            _ => FallocateFlags::ZERO_RANGE,
        };
        fallocate(file, flags, at, len).expect("fallocate");
    }

    fn clone_file(&mut self, random: &mut Random) {
        let path = self.new_path(random);
        let Some(original) = pick(&self.files, random) else { return };
        let original = File::open(original).expect("a file");
        let clone = File::create(&path).expect("a file");
        rustix::fs::ioctl_ficlone(&clone, &original).expect("a clone");
        if random.below(2) == 0 {
            clone.write_all_at(&random.bytes(4096), 0).expect("a write");
            clone.sync_all().expect("a sync");
        }
        self.files.push(path);
    }

    fn rename(&mut self, random: &mut Random) {
        let new = self.new_path(random);
        let Some(index) = pick_index(self.files.len(), random) else { return };
        fs::rename(&self.files[index], &new).expect("a rename");
        self.files[index] = new;
    }

    fn remove(&mut self, random: &mut Random) {
        let Some(index) = pick_index(self.files.len(), random) else { return };
        fs::remove_file(self.files.swap_remove(index)).expect("a removal");
    }

    fn remove_directory(&mut self, random: &mut Random) {
        // The first one is the root.
        let Some(index) = pick_index(self.dirs.len() - 1, random) else { return };
        let dir = self.dirs.swap_remove(index + 1);
        fs::remove_dir_all(&dir).expect("a removal");
        self.dirs.retain(|path| !path.starts_with(&dir));
        self.files.retain(|path| !path.starts_with(&dir));
    }

    fn sync_file(&mut self, random: &mut Random) {
        let Some(file) = pick(&self.files, random) else { return };
        File::open(file).and_then(|file| file.sync_all()).expect("a sync");
    }
}

fn pick_index(len: usize, random: &mut Random) -> Option<usize> {
    let len = u64::try_from(len).expect("small");
    (len > 0).then(|| usize::try_from(random.below(len)).expect("small"))
}

fn pick<'a>(list: &'a [PathBuf], random: &mut Random) -> Option<&'a PathBuf> {
    list.get(pick_index(list.len(), random)?)
}
