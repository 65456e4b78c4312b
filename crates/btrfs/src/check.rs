//! The check of a volume: everything that its structures say about each other.
//!
//! A check stands on members, blocks and trees, and not on an open volume, so it works on one that
//! does not open. It writes nothing. What it cannot read is a finding, and it goes on behind that.
//!
//! ```text
//! members   superblocks, chunks, ranges of the members
//! trees     each block of each tree once: references, and what inodes say of themselves
//! groups    each block group on its own: references, extents, free space, checksums
//! whole     subvolumes, UUIDs, the log, quotas
//! ```
//!
//! All of it runs on all cores. What must be compared is sorted: what has no room in memory goes
//! to files ([`sort`]). Memory is bounded by [`CheckOptions::memory_bytes`]: a sixteenth each
//! is for blocks that were read, for nodes that are to be looked at, and for summaries, half for
//! records that are sorted, and the rest for what is compared at a time. Besides that, a check
//! takes 32 MiB for each terabyte of tree blocks ([`addresses`]), and some hundred bytes for each
//! chunk and each subvolume.

mod addresses;
mod finding;
mod groups;
mod inodes;
mod log;
mod marks;
mod members;
mod open;
mod owned;
mod paths;
mod quota;
mod reached;
mod reference;
mod root_blocks;
mod sort;
mod subvolumes;
mod users;
mod volume;
mod walk;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;

use offshoot_btrfs_format::superblock::Superblock;
use offshoot_device::BlockDevice;
use offshoot_vfs::Result;

use walk::Walk;

pub(crate) use groups::bad_data_in;
pub(crate) use open::open;
pub(crate) use paths::path_of_inode;
pub(crate) use quota::{GroupBytes, QuotaGroups};
pub(crate) use reached::{ExtentWithOwners, ReachedVolume};
pub(crate) use reference::ReferenceTarget;
pub(crate) use subvolumes::{LinkPlace, ListedRoot, RootTreeItems, is_possible_removal};
pub(crate) use users::{DataUsers, used_range, users_of};
pub(crate) use volume::{CheckedVolume, KeyRange, Walked};

pub use finding::{BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, FindingSeverity};
pub use users::DataUser;

/// Options of a check.
#[derive(Clone, Debug)]
pub struct CheckOptions {
    /// Whether the check goes on although members are missing.
    pub is_degraded: bool,
    /// Whether all data is read and compared with its checksums.
    pub verifies_data: bool,
    /// How much memory the check may take, in bytes. At least 16 MiB.
    pub memory_bytes: u64,
    /// The folder for files of records that have no room in memory; `None` for that of the host.
    pub scratch: Option<PathBuf>,
}

impl Default for CheckOptions {
    fn default() -> Self {
        Self { is_degraded: false, verifies_data: false, memory_bytes: 256 << 20, scratch: None }
    }
}

/// An event of a running check.
#[derive(Debug)]
pub enum CheckEvent {
    /// How many bytes of tree blocks and data were looked at, and how many there are, as far as
    /// that is known.
    Progress {
        /// Looked at.
        done: u64,
        /// In all. At least `done`.
        total: u64,
    },
}

/// Receives every event, on the thread that it happens on. After a `Break` the check ends soon.
pub type CheckWatch<'w> = dyn Fn(&CheckEvent) -> ControlFlow<()> + Sync + 'w;

/// What a check found.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CheckOutcome {
    /// The first 10,000 findings, by code and place.
    pub findings: Vec<BtrfsFinding>,
    /// Whether there are more.
    pub are_more: bool,
    /// What was looked at.
    pub counts: CheckCounts,
}

/// What a check looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CheckCounts {
    /// Trees, those of subvolumes included.
    pub trees: u64,
    /// Tree blocks. Each counts once.
    pub tree_blocks: u64,
    /// Inodes. One that several snapshots share counts for each of them.
    pub inodes: u64,
    /// Extents of data.
    pub data_extents: u64,
    /// Bytes of data that were compared with checksums.
    pub data_bytes: u64,
}

/// Checks the volume on `devices`.
///
/// # Errors
/// When no superblock verifies, the volume has a feature that is not known, a member is missing
/// and [`CheckOptions::is_degraded`] is false, a file for records cannot be written, or `watch`
/// ended the check (`EINTR`). Everything else is a finding.
pub fn check_btrfs(
    devices: Vec<Arc<dyn BlockDevice>>,
    options: &CheckOptions,
    watch: &CheckWatch<'_>,
) -> Result<CheckOutcome> {
    check_at(devices, None, options, watch)
}

/// As [`check_btrfs`], of the commit with the superblock `at`. What that commit refers to is not
/// written meanwhile.
pub(crate) fn check_at(
    devices: Vec<Arc<dyn BlockDevice>>,
    at: Option<Superblock>,
    options: &CheckOptions,
    watch: &CheckWatch<'_>,
) -> Result<CheckOutcome> {
    let volume = open::open(devices, at, options, watch)?;
    members::check(&volume)?;
    let walk = Walk::new(&volume, &groups::bounds(&volume));
    let walked = walk.run()?;
    walk.check_root_blocks();
    let extents = groups::check(&walk, &walked)?;
    subvolumes::check(&volume)?;
    log::check(&volume)?;
    quota::check(&walk, &walked)?;
    drop(walk);
    volume.require_going_on()?;
    volume.note_reports();
    let counts = CheckCounts {
        trees: walked.trees.len() as u64,
        tree_blocks: walked.blocks,
        inodes: walked.inodes,
        data_extents: extents.data_extents,
        data_bytes: extents.data_bytes,
    };
    let (mut findings, are_more) = volume.findings.take_list();
    paths::find(&volume, &mut findings);
    Ok(CheckOutcome { findings, are_more, counts })
}
