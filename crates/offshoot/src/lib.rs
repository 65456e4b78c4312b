//! Reads, makes and edits volumes of btrfs and XFS, in images and on disks, without root and
//! without the kernel.
//!
//! ```
//! use offshoot::{CreateOptions, OpenOptions, Result, Volume};
//!
//! fn main() -> Result<()> {
//! #   let dir = tempfile::tempdir().unwrap();
//! #   std::env::set_current_dir(&dir).unwrap();
//!     let volume = Volume::create("new.img", 1 << 30, &CreateOptions::new().label("demo"))?;
//!     volume.create_dir_all("/srv/www")?;
//!     volume.write("/srv/www/index.html", "<h1>hello</h1>\n")?;
//!     volume.snapshot("/", "/monday", true)?;
//!     volume.sync()?;
//!     drop(volume);
//!
//!     let volume = OpenOptions::new().write(true).open("new.img")?;
//!     volume.remove_dir_all("/srv/www")?;
//!     assert_eq!(volume.read("/monday/srv/www/index.html")?, b"<h1>hello</h1>\n");
//!     volume.sync()
//! }
//! ```
//!
//! [`Volume::open`] finds by itself what is at a path: a volume, a disk with partitions, an image
//! (qcow2, VMDK, VDI, VHD, VHDX), or one of these compressed. [`OpenOptions`] opens it in other
//! ways, and devices that a program implements itself. A volume of XFS is made with
//! [`CreateOptions::format`]; it has no subvolumes.
//!
//! | for | use |
//! |---|---|
//! | files by path | the methods of [`Volume`] |
//! | files by number, as a mount sees them: all that a file can have | [`Volume::files`]: [`FileSystem`] and [`FileSystemMut`] |
//! | trees from and to the host, and tar archives | [`transfer`] |
//! | the check of a volume, the recovery of an XFS volume | [`OpenOptions::check`], [`OpenOptions::recover`] |
//! | block devices: files, memory, partitions, images, power cuts | [`device`] |
//! | errors | [`Error`] has four kinds, and [`Code`] a number for each obstacle and each damaged structure |
//!
//! What cannot be verified is an error, never bytes: all metadata, and the data of btrfs. Data of
//! XFS has no checksums. What was changed is durable after [`Volume::sync`], and a crash loses
//! nothing of it.

mod find;
mod options;
mod volume;
mod whole;

pub use offshoot_device as device;
pub use offshoot_device::BlockDevice;
pub use offshoot_transfer as transfer;
pub use offshoot_vfs as vfs;
pub use offshoot_vfs::{
    Attr, Code, Corrupt, Errno, Error, FileId, FileSystem, FileSystemMut, FileType, Result,
    SetAttr, SetTime, StatFs, Timestamp,
};

pub use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CheckEvent, CheckOptions, CheckOutcome,
    FindingSeverity, check_btrfs,
};
pub use offshoot_xfs::{
    XfsCheckResult, XfsFinding, XfsFindingCode, XfsFindingPlace, XfsLogState, XfsRecovery,
};

pub use options::{CreateOptions, OpenOptions};
pub use volume::{DirEntry, ReadDir, Volume, WalkEntry};
pub use whole::VolumeFindings;

/// The programs in the documents of the repository.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/embedding.md")]
mod embedding {}
