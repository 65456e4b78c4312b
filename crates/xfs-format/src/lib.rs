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
//! | [`csum`] | the checksum |
//! | [`log`] | the log: records, ops, items, transactions, the ring |

pub mod csum;
pub mod geometry;
pub mod ids;
pub mod log;

pub use geometry::XfsGeometry;
pub use ids::{AgBlock, AgIno, AgNumber, BasicBlock, FileBlock, FsBlock, Ino, Lsn};
pub use offshoot_vfs::{Malformed, Structure};
pub use zerocopy::big_endian::{U16, U32, U64};
