//! What the items of one inode say of each other.
//!
//! Kernels leave some states that look wrong and are not:
//!
//! 1. An inode without links is removed in several transactions, and only the last one changes its
//!    item. So its size and its bytes are not compared.
//! 2. Extents may lie behind the size of a file: they were allocated in advance.
//! 3. A crash while fs-verity is being enabled leaves items of it and no flag. The inode is listed
//!    for removal then, and the next mount removes these items.
//! 4. The removal of an inode and that of its orphan item are two transactions. So an orphan item
//!    may lead to no inode.
//! 5. The kernel once stored the target of a symbolic link with a zero byte behind it.

use offshoot_btrfs_format::inode::inode_flags;
use offshoot_btrfs_format::superblock::Incompat;
use offshoot_btrfs_format::{Generation, Ino};
use offshoot_vfs::FileType;

use super::super::finding::BtrfsFindingCode;
use super::super::volume::CheckedVolume;
use super::items::{CheckedInode, InodeFacts};

/// What a volume demands of inodes.
#[derive(Clone, Copy, Debug)]
pub(super) struct InodeRules {
    pub(super) sector_size: u64,
    /// Whether a range of a file without data needs no extent.
    has_no_holes: bool,
    /// The newest generation that an extent may have.
    pub(super) newest: Generation,
}

impl InodeRules {
    pub(super) fn of(volume: &CheckedVolume<'_>) -> Self {
        let has_no_holes = volume.superblock().incompat.has(Incompat::NO_HOLES);
        // The kernel may write an extent in the transaction that follows the commit.
        let newest = Generation(volume.superblock().generation.0.saturating_add(1));
        Self { newest, ..Self::new(volume.sector_size(), has_no_holes) }
    }

    pub(super) const fn new(sector_size: u64, has_no_holes: bool) -> Self {
        Self { sector_size, has_no_holes, newest: Generation(u64::MAX) }
    }

    /// `bytes`, rounded up to whole sectors.
    pub(super) fn whole_sectors(self, bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(self.sector_size).unwrap_or(u64::MAX)
    }
}

/// What is wrong with an inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct InodeFinding {
    pub(super) code: BtrfsFindingCode,
    pub(super) ino: u64,
    pub(super) problem: String,
    /// The expected value and the found one.
    pub(super) values: Option<(String, String)>,
    /// Whether this is as it should be if the inode is listed for removal.
    pub(super) is_legal_for_orphans: bool,
}

impl InodeFinding {
    /// About how much memory it takes, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        let values = self.values.as_ref().map_or(0, |(one, other)| one.len() + other.len());
        (size_of::<Self>() + self.problem.len() + values) as u64
    }
}

/// Judges one inode.
struct InodeJudge<'j> {
    rules: InodeRules,
    inode: &'j CheckedInode,
    item: InodeFacts,
    findings: &'j mut Vec<InodeFinding>,
}

/// Adds what is wrong with an inode that is there as a whole to `findings`.
pub(super) fn judge(rules: InodeRules, inode: &CheckedInode, findings: &mut Vec<InodeFinding>) {
    let Some(item) = inode.item else {
        if inode.has_other_items {
            findings.push(InodeFinding {
                code: BtrfsFindingCode::MissingInode,
                ino: inode.ino,
                problem: "it has items, and no item of the inode itself".into(),
                values: None,
                is_legal_for_orphans: false,
            });
        }
        return;
    };
    let mut judge = InodeJudge { rules, inode, item, findings };
    judge.links();
    judge.extents();
    judge.compression();
    judge.verity();
    match item.file_type() {
        None => judge.add(BtrfsFindingCode::Inode, format!("mode {:#o} has no type", item.mode)),
        Some(FileType::Directory) => judge.directory(),
        Some(file_type) => judge.file(file_type),
    }
}

impl InodeJudge<'_> {
    fn add(&mut self, code: BtrfsFindingCode, problem: impl Into<String>) {
        self.findings.push(InodeFinding {
            code,
            ino: self.inode.ino,
            problem: problem.into(),
            values: None,
            is_legal_for_orphans: false,
        });
    }

    /// Adds a finding unless two numbers are the same.
    fn same(&mut self, code: BtrfsFindingCode, what: &str, expected: u64, found: u64) {
        if expected != found {
            self.findings.push(InodeFinding {
                code,
                ino: self.inode.ino,
                problem: what.into(),
                values: Some((expected.to_string(), found.to_string())),
                is_legal_for_orphans: false,
            });
        }
    }

    fn has_links(&self) -> bool {
        self.item.links > 0
    }

    fn links(&mut self) {
        let links = u64::from(self.item.links);
        self.same(BtrfsFindingCode::LinkCount, "links", self.inode.names, links);
        if self.inode.has_wrong_root_name {
            let problem = "it is a name of itself, and that is not `..` with the index 0";
            self.add(BtrfsFindingCode::Inode, problem);
        }
    }

    fn directory(&mut self) {
        let entries = self.inode.entries;
        if !self.inode.extents.is_empty() {
            self.add(BtrfsFindingCode::FileExtent, "a directory with file extents");
        }
        if entries.difference != 0 {
            let problem = "its entries by hash and those by index are not the same";
            self.add(BtrfsFindingCode::EntryItems, problem);
        }
        if self.has_links() {
            // Each entry counts twice: by hash and by index.
            let expected = entries.name_bytes.saturating_mul(2);
            self.same(BtrfsFindingCode::InodeSize, "size", expected, self.item.size);
        }
    }

    /// What is not a directory.
    fn file(&mut self, file_type: FileType) {
        if self.inode.entries.are_there {
            self.add(BtrfsFindingCode::Inode, "it has entries, and is no directory");
        }
        if self.inode.ino == Ino::ROOT_DIR.0 {
            self.add(BtrfsFindingCode::Inode, "the root of a subvolume that is no directory");
        }
        match file_type {
            FileType::Regular => self.contents(),
            FileType::Symlink => {
                self.contents();
                self.symlink();
            }
            _ if !self.inode.extents.is_empty() => {
                self.add(BtrfsFindingCode::FileExtent, "a special file with file extents");
            }
            _ => {}
        }
    }

    /// The contents of a regular file or symbolic link.
    fn contents(&mut self) {
        if !self.has_links() {
            return;
        }
        let extents = &self.inode.extents;
        self.same(BtrfsFindingCode::InodeBytes, "bytes", extents.bytes, self.item.bytes);
        let hole = extents.first_hole();
        if !self.rules.has_no_holes && hole < self.item.size {
            let problem = format!("no extent at offset {hole} of {} bytes", self.item.size);
            self.add(BtrfsFindingCode::FileHole, problem);
        }
    }

    fn symlink(&mut self) {
        if self.item.flags & (inode_flags::IMMUTABLE | inode_flags::APPEND) != 0 {
            let names = inode_flags::names(self.item.flags).join(", ");
            self.add(BtrfsFindingCode::Inode, format!("a symbolic link with the flags {names}"));
        }
        let Some(target) = self.inode.extents.inline else {
            if self.has_links() && self.inode.extents.is_empty() {
                self.add(BtrfsFindingCode::InodeSize, "a symbolic link without a target");
            }
            return;
        };
        let is_with_zero =
            target.ends_with_zero && target.len.checked_sub(1) == Some(self.item.size);
        if self.has_links() && !is_with_zero {
            let what = "size of a symbolic link";
            self.same(BtrfsFindingCode::InodeSize, what, target.len, self.item.size);
        }
    }

    fn extents(&mut self) {
        if let Some(offset) = self.inode.extents.overlap {
            let problem = format!("the extent at offset {offset} overlaps the one before it");
            self.add(BtrfsFindingCode::FileExtent, problem);
        }
        if let Some(offset) = self.inode.extents.damaged {
            let problem = format!("the extent at offset {offset} is empty or damaged");
            self.add(BtrfsFindingCode::FileExtent, problem);
        }
    }

    fn compression(&mut self) {
        if self.inode.extents.are_compressed && self.item.flags & inode_flags::NODATASUM != 0 {
            let problem = "compressed extents of a file without checksums";
            self.add(BtrfsFindingCode::FileExtent, problem);
        }
    }

    fn verity(&mut self) {
        let has_flag = self.item.flags & inode_flags::VERITY != 0;
        let problem = match &self.inode.verity {
            None if has_flag => Some("the items of fs-verity are missing".into()),
            None => None,
            Some(items) if has_flag => items.problem(self.item.size),
            Some(_) => Some("it has items of fs-verity, and is not under it".into()),
        };
        if let Some(problem) = problem {
            self.findings.push(InodeFinding {
                code: BtrfsFindingCode::Verity,
                ino: self.inode.ino,
                problem,
                values: None,
                is_legal_for_orphans: !has_flag,
            });
        }
    }
}
