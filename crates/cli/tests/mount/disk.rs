//! Volumes of both formats, as the tests mount them.

use std::path::PathBuf;

use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::btrfs::judges::Judges;
use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::xfs::disk::{RECOVERY, XfsDisk};
use offshoot_testkit::xfs::judges::XfsJudges;

use super::format::is_xfs;

/// The smallest volume of XFS, in MiB.
const LEAST_XFS_MIB: u64 = 300;

/// A volume in an image.
pub(crate) enum MountDisk {
    Btrfs(Disks),
    Xfs(XfsDisk, [PathBuf; 1]),
}

impl MountDisk {
    /// An empty image for a volume of the format of the test.
    pub(crate) fn create(judges: &Judges, mib: u64) -> Self {
        if !is_xfs() {
            return Self::Btrfs(Disks::create(judges, 1, mib));
        }
        let judges: XfsJudges =
            offshoot_testkit::xfs::judges::require().expect("a machine with judges has those too");
        let disk = XfsDisk::create(&judges, mib.max(LEAST_XFS_MIB));
        let images = [disk.image().to_path_buf()];
        Self::Xfs(disk, images)
    }

    /// The name of its format.
    pub(crate) fn format(&self) -> &'static str {
        match self {
            Self::Btrfs(_) => "btrfs",
            Self::Xfs(..) => "xfs",
        }
    }

    pub(crate) fn images(&self) -> &[PathBuf] {
        match self {
            Self::Btrfs(disks) => disks.images(),
            Self::Xfs(_, images) => images,
        }
    }

    /// Makes a volume with the program of the format.
    pub(crate) fn mkfs(&self) {
        match self {
            Self::Btrfs(disks) => disks.mkfs(&[]),
            Self::Xfs(disk, _) => disk.mkfs(""),
        }
    }

    /// Mounts it with the kernel, which must have nothing to complain of, nor a log of XFS to
    /// recover.
    pub(crate) fn mount(&self, options: &str) -> LoopMount {
        match self {
            Self::Btrfs(disks) => disks.mount(options).into_mount(),
            Self::Xfs(disk, _) => disk.mount(options, &[]),
        }
    }

    /// What a server leaves that was killed. The kernel recovers the log of XFS, whose checker
    /// refuses a log that is not empty.
    #[track_caller]
    pub(crate) fn assert_checks_after_kill(&self) {
        if let Self::Xfs(disk, _) = self {
            drop(disk.mount("rw", &[RECOVERY]));
        }
        self.assert_checks();
    }

    /// Has `btrfs check` or `xfs_repair` find nothing.
    #[track_caller]
    pub(crate) fn assert_checks(&self) {
        match self {
            Self::Btrfs(disks) => disks.assert_checks(),
            Self::Xfs(disk, _) => disk.assert_checks(),
        }
    }
}
