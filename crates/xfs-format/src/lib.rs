//! The XFS on-disk format.
//!
//! Structures, records, checksums and the log, as the disk stores them. The crate has no I/O, no
//! locks and no unsafe code: a caller passes bytes in, and gets typed values or a [`Malformed`]
//! out. Integers on disk are big-endian, but for checksums, which are little-endian, and the
//! contents of log items, which have the byte order of the machine that wrote them.
//!
//! Names are those of the book "XFS Algorithms & Data Structures"
//! (<https://mirrors.edge.kernel.org/pub/linux/utils/fs/xfs/docs/xfs_filesystem_structure.pdf>).
//!
//! | module | what it holds |
//! |---|---|
//! | [`ids`], [`geometry`] | numbers with types; the sizes that all structures of a volume share |
//! | [`csum`], [`identity`] | the checksum; where units say what they are |
//! | [`btree`], [`record`] | blocks of trees, roots of trees in inodes; the records in them |
//! | [`inode`] | inode cores, and the forks behind them |
//! | [`hash`] | the hashes of names |
//! | [`da`] | what blocks of directories and of attribute forks have in common; their nodes |
//! | [`dir`] | directories |
//! | [`attr`], [`parent`] | extended attributes; those that are parent pointers |
//! | [`symlink`], [`remote`] | targets of symbolic links; blocks of targets and of values |
//! | [`log`] | the log: records, ops, items, transactions, the ring |
//! | [`superblock`], [`features`] | the superblock; its features, and which of them keep us from reading or writing |
//! | [`group`] | the headers of groups: AGF, AGI and AGFL |

pub mod attr;
pub mod btree;
pub mod csum;
pub mod da;
pub mod dir;
pub mod features;
pub mod geometry;
pub mod group;
pub mod hash;
pub mod identity;
pub mod ids;
pub mod inode;
mod layout;
pub mod log;
pub mod parent;
pub mod record;
pub mod remote;
pub mod superblock;
pub mod symlink;

pub use geometry::XfsGeometry;
pub use ids::{AgBlock, AgIno, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Lsn};
pub use offshoot_vfs::{Malformed, Structure};
pub use zerocopy::big_endian::{U16, U32, U64};
