//! `offshoot build` as a user runs it. Tests of what both formats have run on both ([`format`]).
//!
//! | module | judge |
//! |---|---|
//! | `deduped` | the same, of equal data that is stored once |
//! | `layered` | the same, of layers as snapshots |
//! | `judged` | the check of the format, and the kernel, whose mount shows what the source has |
//! | `manifests` | the same, from the manifests of other programs |
//! | `minimal` | the smallest images of `mkfs.btrfs`; `btrfs check`, the kernel, which shows, writes and fills them |
//! | `refused` | what must be refused, and that nothing is left of it |
//! | `shaped` | what other programs set or say, where options change what the sources have |
//! | `same` | the bytes of images that are built again |

mod deduped;
#[path = "../shared/format.rs"]
mod format;
mod judged;
mod layered;
#[path = "../shared/lines.rs"]
mod lines;
mod manifests;
mod minimal;
mod oci;
#[path = "../shared/program.rs"]
mod other_program;
#[path = "../shared/processors.rs"]
mod processors;
mod refused;
mod same;
mod shaped;
#[path = "../shared/shuffled.rs"]
mod shuffled;

use std::any::Any;
use std::path::Path;

use format::{is_xfs, on_both};
use lines::{does, fails, offshoot, program, words};
use offshoot_testkit::btrfs::disks::{Disks, MountedMembers, assert_image_checks};
use offshoot_testkit::loops::LoopMount;
use offshoot_testkit::xfs::disk::XfsDisk;

/// The name of the format that a test runs on.
fn format_name() -> &'static str {
    if is_xfs() { "xfs" } else { "btrfs" }
}

/// Has `btrfs check` or `xfs_repair` look at the image.
#[track_caller]
fn check(judges: &BuildJudges, image: &Path) {
    match judges {
        BuildJudges::Btrfs(_) => assert_image_checks(image),
        BuildJudges::Xfs(judges) => XfsDisk::served(judges, image).assert_checks(),
    }
}

/// A volume that the kernel has mounted.
struct BuiltMount {
    mount: LoopMount,
    /// The image, if it is one for this mount alone.
    _disk: Option<Box<dyn Any>>,
}

impl BuiltMount {
    fn path(&self) -> &Path {
        self.mount.path()
    }
}

/// The proof that the judges of the format are there.
enum BuildJudges {
    Btrfs(offshoot_testkit::btrfs::judges::Judges),
    Xfs(offshoot_testkit::xfs::judges::XfsJudges),
}

impl BuildJudges {
    fn require() -> Option<Self> {
        if is_xfs() {
            offshoot_testkit::xfs::judges::require().map(Self::Xfs)
        } else {
            offshoot_testkit::btrfs::judges::require().map(Self::Btrfs)
        }
    }

    /// A new volume of the format, mounted by the kernel to be filled.
    fn scratch(&self, mib: u64) -> BuiltMount {
        match self {
            Self::Btrfs(judges) => {
                let disks = Disks::create(judges, 1, mib);
                disks.mkfs(&[]);
                let mount = disks.mount("noatime").into_mount();
                BuiltMount { mount, _disk: Some(Box::new(disks)) }
            }
            Self::Xfs(judges) => {
                let disk = XfsDisk::create(judges, mib);
                disk.mkfs("");
                let mount = disk.mount("noatime", &[]);
                BuiltMount { mount, _disk: Some(Box::new(disk)) }
            }
        }
    }

    /// An image, mounted by the kernel.
    fn mount(&self, image: &Path) -> BuiltMount {
        match self {
            Self::Btrfs(_) => {
                let mount = MountedMembers::try_new(&[image.to_path_buf()], "ro,noatime")
                    .unwrap_or_else(|reason| panic!("{reason}"));
                BuiltMount { mount: mount.into_mount(), _disk: None }
            }
            Self::Xfs(judges) => {
                let mount = XfsDisk::served(judges, image).mount("ro,noatime", &[]);
                BuiltMount { mount, _disk: None }
            }
        }
    }
}
