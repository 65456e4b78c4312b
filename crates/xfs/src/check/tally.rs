//! Links, file types and parents: what the entries of all directories say about each inode,
//! compared with the inode.
//!
//! Directories and inodes are read in any order, by many threads. Each inode that is in use or
//! free has four counters, 16 bytes. A name adds to them what the inode takes away, so in the end
//! all are zero. Except for the links they are sums of hashes: another sum is as unlikely to be
//! zero as one in 4 billion.
//!
//! | counter | each name adds | the inode takes away |
//! |---|---|---|
//! | links | 1 | its links |
//! | types | the type of the entry | its type, once for each link |
//! | above | in a directory, the directory with the name | what `..` names |
//! | parents | parent, generation and name | each of its parent pointers |

use std::hash::{DefaultHasher, Hash, Hasher};

use offshoot_kit::sync::atomic::{AtomicU32, Ordering};
use offshoot_xfs_format::record::CHUNK_INODES;
use offshoot_xfs_format::{AgIno, AgNumber, Ino};

use super::finding::XfsFindingCode as Code;
use super::group::GroupInodes;
use super::whole::VolumeCheck;

/// The counters of one inode.
#[derive(Debug, Default)]
pub(super) struct InodeTally {
    links: AtomicU32,
    types: AtomicU32,
    above: AtomicU32,
    parents: AtomicU32,
}

#[cfg(not(feature = "shuttle"))]
const _: () = assert!(size_of::<InodeTally>() == 16);

/// The counters of all inodes in a range of groups.
pub(super) struct LinkTally<'a> {
    inodes: &'a [GroupInodes],
    first: u32,
    groups: Vec<Vec<InodeTally>>,
}

/// What a tally knows of an inode number.
pub(super) enum TallyPlace<'a> {
    /// The group is not in the range, or its inodes are not known.
    Elsewhere,
    /// No inode in use has the number.
    Unused,
    Used(&'a InodeTally),
}

/// A hash of 32 bits.
#[expect(clippy::cast_possible_truncation, reason = "half of a hash")]
fn hash(value: impl Hash) -> u32 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish() as u32
}

fn add(counter: &AtomicU32, number: u32) {
    counter.fetch_add(number, Ordering::Relaxed);
}

fn take(counter: &AtomicU32, number: u32) {
    counter.fetch_sub(number, Ordering::Relaxed);
}

impl InodeTally {
    /// A name of the inode, or a directory's own name for itself: `.`, or `..` in one below.
    pub(super) fn add_link(&self, file_type: u8) {
        add(&self.links, 1);
        add(&self.types, hash(file_type));
    }

    /// A directory has the inode, which is a directory.
    pub(super) fn add_above(&self, above: Ino) {
        add(&self.above, hash(above.0));
    }

    /// A directory of this generation has the inode under a name.
    pub(super) fn add_name(&self, above: Ino, generation: u32, name: &[u8]) {
        add(&self.parents, hash((above.0, generation, name)));
    }

    /// The links and the type of the inode.
    pub(super) fn take_links(&self, links: u32, file_type: u8) {
        take(&self.links, links);
        take(&self.types, hash(file_type).wrapping_mul(links));
    }

    /// What `..` names.
    pub(super) fn take_above(&self, above: Ino) {
        take(&self.above, hash(above.0));
    }

    /// A parent pointer of the inode.
    pub(super) fn take_name(&self, above: Ino, generation: u32, name: &[u8]) {
        take(&self.parents, hash((above.0, generation, name)));
    }
}

impl<'a> LinkTally<'a> {
    /// The inodes that have counters at a time, unless one group alone has more: 256 MiB.
    pub(super) const MOST_INODES: usize = (256 << 20) / size_of::<InodeTally>();

    /// Counters for the groups from `first` on: for as many as there is room for.
    pub(super) fn new(inodes: &'a [GroupInodes], first: usize, most_inodes: usize) -> Self {
        let mut groups: Vec<Vec<InodeTally>> = Vec::new();
        let mut count = 0_usize;
        for group in inodes.iter().skip(first) {
            let more = group.chunks.len() * CHUNK_INODES as usize;
            count = count.saturating_add(more);
            if count > most_inodes && !groups.is_empty() {
                break;
            }
            groups.push(std::iter::repeat_with(InodeTally::default).take(more).collect());
        }
        Self { inodes, first: u32::try_from(first).unwrap_or(u32::MAX), groups }
    }

    /// The group behind the last one that has counters.
    pub(super) fn end(&self) -> u32 {
        self.first.saturating_add(u32::try_from(self.groups.len()).unwrap_or(u32::MAX))
    }

    /// The counters of an inode.
    pub(super) fn place(&self, check: &VolumeCheck<'_>, ino: Ino) -> TallyPlace<'_> {
        let Some((ag, inode)) = check.geometry().split_ino(ino) else { return TallyPlace::Unused };
        let inodes = self.inodes.get(ag.0 as usize).filter(|inodes| inodes.is_whole());
        let group = ag.0.checked_sub(self.first).and_then(|group| self.groups.get(group as usize));
        let (Some(inodes), Some(group)) = (inodes, group) else { return TallyPlace::Elsewhere };
        let used = inodes.find_used(inode.0);
        let place = used.map(|(chunk, index)| chunk * CHUNK_INODES as usize + index as usize);
        place.and_then(|place| group.get(place)).map_or(TallyPlace::Unused, TallyPlace::Used)
    }

    /// Reports the inodes of a group whose counters are not zero.
    pub(super) fn check(&self, check: &VolumeCheck<'_>, ag: AgNumber, has_parents: bool) {
        let Some(inodes) = self.inodes.get(ag.0 as usize) else { return };
        for chunk in &inodes.chunks {
            for index in (0..CHUNK_INODES).filter(|index| chunk.in_use() & 1 << index != 0) {
                let ino = check.geometry().ino(ag, AgIno(chunk.start().0.saturating_add(index)));
                if let TallyPlace::Used(tally) = self.place(check, ino) {
                    tally.report(check, ino, has_parents);
                }
            }
        }
    }
}

impl InodeTally {
    fn report(&self, check: &VolumeCheck<'_>, ino: Ino, has_parents: bool) {
        let number = |counter: &AtomicU32| counter.load(Ordering::Relaxed);
        let links = number(&self.links).cast_signed();
        let bad = |code, problem: String| check.findings.add(code, ino, problem);
        if links != 0 {
            let (count, which) = (links.unsigned_abs(), if links > 0 { "more" } else { "fewer" });
            bad(
                Code::LinkCount,
                format!("directories have {count} names {which} than it has links"),
            );
        } else if number(&self.types) != 0 {
            bad(Code::EntryType, "a name of it has another file type".to_owned());
        }
        if number(&self.above) != 0 {
            bad(Code::DotDot, "`..` is not the directory that has it".to_owned());
        }
        if has_parents && number(&self.parents) != 0 {
            let problem = "its parent pointers are not the names that directories have for it";
            bad(Code::ParentPointer, problem.to_owned());
        }
    }
}
