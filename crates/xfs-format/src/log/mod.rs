//! The log: a ring of records, and the transactions in them.
//!
//! A *record* ([`record`]) is what one write brings to the ring. Its body is a series of *ops*
//! ([`op`]), each a piece of a transaction. A transaction is a list of *items* ([`items`]), each a
//! few *regions* of bytes ([`vector`]). Several transactions are in flight at once, so their ops
//! interleave; [`checkpoint`] puts them together again. [`ring`] is the arithmetic of the ring, and
//! [`ends`] finds where the valid part of it begins and ends.
//!
//! Integers of records and ops are big-endian. Those inside items have the byte order of the
//! machine that wrote them. Only little-endian logs are read, as the kernel reads only its own
//! order.

pub mod checkpoint;
pub mod ends;
pub mod items;
pub mod op;
pub mod record;
pub mod ring;
pub mod vector;

pub use checkpoint::{XfsCheckpoint, XfsCheckpoints};
pub use ends::XfsLogEnds;
pub use items::XfsLogItem;
pub use record::XfsLogRecord;
pub use ring::XfsLogRing;
pub use vector::{XfsLogVector, XfsRegions};

use offshoot_vfs::{Malformed, Structure};

use crate::ids::BASIC_BLOCK;

/// The bytes of a basic block, in which the log counts.
pub const BLOCK: usize = 1 << BASIC_BLOCK.ilog2();

/// The same, for lengths that records store.
const BLOCK_BYTES: u32 = 1 << BASIC_BLOCK.ilog2();

#[cold]
fn bad_record(problem: impl Into<std::borrow::Cow<'static, str>>) -> Malformed {
    Malformed::new(Structure::LogRecord, problem)
}

#[cold]
fn bad_item(problem: impl Into<std::borrow::Cow<'static, str>>) -> Malformed {
    Malformed::new(Structure::LogItem, problem)
}
