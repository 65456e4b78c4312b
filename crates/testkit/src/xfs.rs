//! The judges of XFS, which are `xfsprogs` and the kernel over a loop device, and volumes for them.
//!
//! ```no_run
//! use std::path::Path;
//!
//! use offshoot_testkit::xfs::{judges, matrix::MATRIX, recipe::XfsRecipe};
//! use offshoot_vfs::FileSystem;
//!
//! fn shows_what_the_kernel_shows(open: fn(&Path) -> Box<dyn FileSystem>) {
//!     let Some(judges) = judges::require() else { return };
//!     for kind in MATRIX {
//!         let filled = XfsRecipe::new(kind).make(&judges);
//!         let ours = open(filled.disk.image());
//!         filled.compare(&*ours).assert_same(kind.names_at_least);
//!     }
//! }
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`judges`] | whether a test may run here, must fail, or is skipped; which `xfsprogs` |
//! | [`disk`] | the image of a volume: `mkfs.xfs`, mounts, `xfs_repair`, `xfs_db`, shutdown |
//! | [`churn`] | random changes of a mounted volume, for its log |
//! | [`fill`] | what the kernel writes into a volume before we read it |
//! | [`matrix`] | the kinds of volumes that a reader has to know |
//! | [`recipe`] | how a volume is made, filled and compared |
//! | [`old`] | volumes of version 4, which this kernel does not mount |
//!
//! Tests beside a [`Model`](crate::model::Model) leave [`MISSING_FLAGS`] out, and
//! [compare](comparison) what the model keeps as XFS does.

pub mod churn;
pub mod disk;
pub mod fill;
pub mod judges;
pub mod matrix;
pub mod old;
pub mod recipe;

use offshoot_vfs::FileFlags;

use crate::compare::{Aspect, Compare};

/// The flags that XFS does not have.
pub const MISSING_FLAGS: FileFlags = FileFlags::COMPRESS
    .union(FileFlags::NOCOMPRESS)
    .union(FileFlags::NODATACOW)
    .union(FileFlags::DIRSYNC);

/// The comparison of a volume with a model, which has ids, cookies, sizes of directories and space
/// of its own.
#[must_use]
pub fn comparison() -> Compare {
    Compare::default()
        .without(Aspect::Ids)
        .without(Aspect::Order)
        .without(Aspect::Allocation)
        .without(Aspect::DirectorySize)
}
