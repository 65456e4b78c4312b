//! Random operations on directories with many names, files of many extents, and attributes of every
//! length, so that each structure grows and shrinks. The numbered workloads leave them small.

use std::collections::{BTreeMap, BTreeSet};

use offshoot_vfs::Fallocate;

use crate::crash::workload::{SharedRange, Workload, WorkloadOp, WorkloadStep};
use crate::random::Random;

/// Most files are shorter, in bytes. The rules know parts of sectors up to there.
const MOST_BYTES: u64 = 120_000;

/// The unit of operations on whole blocks, in bytes.
const BLOCK: u64 = 4096;

/// The lengths of attributes: in the inode, in a block, and in blocks of their own.
const ATTRIBUTES: [usize; 6] = [0, 20, 300, 3000, 9000, 65_536];

/// The names that the workload has made so far.
struct MixedTree {
    random: Random,
    dirs: Vec<String>,
    /// The number of the file that a path leads to.
    paths: BTreeMap<String, usize>,
    /// The attributes of each file.
    attributes: Vec<BTreeSet<u64>>,
    made: u64,
    has_sharing: bool,
}

/// `count` random operations; with `has_sharing` some of them share space. About one in seven is
/// followed by a sync. The same arguments give the same workload.
#[must_use]
pub fn mixed(seed: u64, count: usize, has_sharing: bool) -> Workload {
    let mut tree = MixedTree {
        random: Random::new(seed),
        dirs: vec![String::new()],
        paths: BTreeMap::new(),
        attributes: Vec::new(),
        made: 0,
        has_sharing,
    };
    let mut steps = Vec::new();
    while steps.len() < count {
        tree.step(&mut steps);
    }
    steps.push(WorkloadStep::Sync);
    Workload { name: format!("mixed:{seed}:{count}:{has_sharing}"), setup: Vec::new(), steps }
}

impl MixedTree {
    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.random.below(bound as u64)).expect("small")
    }

    fn new_path(&mut self) -> String {
        self.made += 1;
        let dir = self.below(self.dirs.len());
        let len = [0, 10, 60, 200][self.below(4)];
        format!("{}{}{}", self.dirs[dir], self.made, "n".repeat(len))
    }

    fn path(&mut self) -> Option<String> {
        let count = self.paths.len();
        if count == 0 {
            return None;
        }
        let number = self.below(count);
        self.paths.keys().nth(number).cloned()
    }

    /// A range within the longest files, of blocks or of bytes.
    fn range(&mut self, unit: u64) -> (u64, u64) {
        let units = MOST_BYTES / unit;
        let offset = self.random.below(units * 3 / 4);
        let most = if self.random.below(3) == 0 { units / 4 } else { (units / 16).max(1) };
        (offset * unit, (1 + self.random.below(most)) * unit)
    }

    fn step(&mut self, steps: &mut Vec<WorkloadStep>) {
        let ops = match self.below(20) {
            0..=3 => self.create(),
            4..=8 => self.data(),
            9 => self.path().map(|path| self.unlink(path)).unwrap_or_default(),
            10 => self.directory(),
            11..=12 => self.rename(),
            13..=15 => self.attribute(),
            16 => self.link(),
            _ => self.share(),
        };
        steps.extend(ops.into_iter().map(WorkloadStep::Do));
        match (self.below(21), self.path()) {
            (0, _) => steps.push(WorkloadStep::Sync),
            (1, Some(path)) => steps.push(WorkloadStep::Fsync(path)),
            (2, Some(path)) => steps.push(WorkloadStep::Fdatasync(path)),
            _ => {}
        }
    }

    /// Makes one file, or many small ones.
    fn create(&mut self) -> Vec<WorkloadOp> {
        let count = if self.below(6) == 0 { 30 } else { 1 };
        let made = (0..count).flat_map(|_| {
            let path = self.new_path();
            if self.below(5) == 0 {
                return vec![WorkloadOp::Symlink(path)];
            }
            self.paths.insert(path.clone(), self.attributes.len());
            self.attributes.push(BTreeSet::new());
            let len = [0, 40, 5000, 30_000][self.below(4)];
            let write = WorkloadOp::Write { path: path.clone(), offset: 0, len };
            vec![WorkloadOp::Create(path), write]
        });
        made.collect()
    }

    fn unlink(&mut self, path: String) -> Vec<WorkloadOp> {
        self.paths.remove(&path);
        let open = (self.below(3) == 0).then(|| WorkloadOp::Open(path.clone()));
        open.into_iter().chain([WorkloadOp::Unlink(path)]).collect()
    }

    /// Makes a directory. When there are enough, removes names from the first one.
    fn directory(&mut self) -> Vec<WorkloadOp> {
        self.made += 1;
        if self.dirs.len() < 4 {
            let path = format!("dir{}", self.made);
            self.dirs.push(format!("{path}/"));
            return vec![WorkloadOp::Mkdir(path)];
        }
        let inside = self.dirs[1].clone();
        let names: Vec<_> = self.paths.keys().filter(|path| path.starts_with(&inside)).collect();
        let names: Vec<String> = names.into_iter().take(40).cloned().collect();
        names.into_iter().flat_map(|path| self.unlink(path)).collect()
    }

    fn rename(&mut self) -> Vec<WorkloadOp> {
        let (Some(from), to) = (self.path(), self.new_path()) else { return Vec::new() };
        let over = self.path().filter(|_| self.made.is_multiple_of(3));
        let to = over.unwrap_or(to);
        let file = self.paths[&from];
        // A rename of one name of a file to another one does nothing.
        if self.paths.get(&to) == Some(&file) {
            return Vec::new();
        }
        self.paths.remove(&from);
        self.paths.insert(to.clone(), file);
        vec![WorkloadOp::Rename(from, to)]
    }

    fn link(&mut self) -> Vec<WorkloadOp> {
        let (Some(old), new) = (self.path(), self.new_path()) else { return Vec::new() };
        self.paths.insert(new.clone(), self.paths[&old]);
        vec![WorkloadOp::Link(old, new)]
    }

    fn attribute(&mut self) -> Vec<WorkloadOp> {
        let Some(path) = self.path() else { return Vec::new() };
        let number = self.random.below(12);
        let name = format!("user.{number}-{}", "a".repeat(usize::try_from(number).expect("small")));
        let len = ATTRIBUTES[self.below(ATTRIBUTES.len())];
        let known = &mut self.attributes[self.paths[&path]];
        if known.contains(&number) && self.random.below(3) == 0 {
            known.remove(&number);
            return vec![WorkloadOp::RemoveXattr(path, name)];
        }
        known.insert(number);
        vec![WorkloadOp::SetXattr(path, name, len)]
    }

    fn data(&mut self) -> Vec<WorkloadOp> {
        let Some(path) = self.path() else { return Vec::new() };
        let (offset, len) = self.range(1);
        let (block, blocks) = self.range(BLOCK);
        let allocate = |what| WorkloadOp::Fallocate { path: path.clone(), what, offset, len };
        let shift = |what| {
            let (offset, len) = (block, blocks);
            WorkloadOp::Fallocate { path: path.clone(), what, offset, len }
        };
        let small = |len: u64| usize::try_from(len).expect("small");
        let op = match self.below(14) {
            0..=4 => WorkloadOp::Write { path, offset, len: small(len) },
            5 => WorkloadOp::WriteDirect { path, offset: block, len: small(blocks) },
            6 => WorkloadOp::Truncate(path, offset),
            7..=8 => allocate(Fallocate::PunchHole),
            9 => allocate(Fallocate::Zero { keeps_size: true }),
            10 => allocate(Fallocate::Allocate { keeps_size: false }),
            11 => shift(Fallocate::Collapse),
            12 => shift(Fallocate::Insert),
            _ => {
                // Every other block, so that the file has many extents.
                let pieces = (0..20).map(|number| WorkloadOp::Write {
                    path: path.clone(),
                    offset: number * 2 * BLOCK,
                    len: small(BLOCK),
                });
                return pieces.collect();
            }
        };
        vec![op]
    }

    fn share(&mut self) -> Vec<WorkloadOp> {
        let (Some(from), Some(to)) = (self.path(), self.path()) else { return Vec::new() };
        if !self.has_sharing || self.below(4) == 0 {
            return vec![WorkloadOp::Copy(from, to)];
        }
        let ((offset, len), (to_offset, _)) = (self.range(BLOCK), self.range(BLOCK));
        vec![WorkloadOp::Clone(SharedRange { from, offset, len, to, to_offset })]
    }
}
