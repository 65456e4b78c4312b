//! Ops: the pieces of transactions that the body of a record consists of.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{bad_record, record::BUFFER_MAX};
use crate::{Malformed, U16, U32};

/// The client of ops that belong to transactions.
pub const CLIENT_TRANSACTION: u8 = 0x69;
/// The client of the op that ends a clean log.
pub const CLIENT_LOG: u8 = 0xaa;

/// The bytes of an op's header.
pub const OP_HEADER: usize = size_of::<OpHeader>();

/// The first bytes of the unmount op, in the byte order of the machine.
const UNMOUNT_MAGIC: u16 = 0x556e;

/// The first word of a transaction header, "TRAN".
const TRANSACTION_MAGIC: u32 = 0x5452_414e;

/// The only type of transaction since delayed logging: a checkpoint.
const CHECKPOINT: u32 = 40;

bitflags::bitflags! {
    /// What an op is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct XfsOpFlags: u8 {
        /// The transaction begins.
        const START = 1;
        /// The transaction is complete.
        const COMMIT = 2;
        /// The region goes on in the next record.
        const CONTINUES = 4;
        /// The op goes on with the region that the record before began.
        const CONTINUED = 8;
        /// It ends that region.
        const LAST = 0x10;
        /// The log ends here, and the volume is clean.
        const UNMOUNT = 0x20;
        /// Bits without a meaning are kept, so that recovery can refuse them.
        const _ = !0;
    }
}

/// The header of an op.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct OpHeader {
    tid: U32,
    len: U32,
    clientid: u8,
    flags: u8,
    res2: U16,
}

const _: () = assert!(size_of::<OpHeader>() == 12 && align_of::<OpHeader>() == 1);

/// An op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsLogOp<'a> {
    /// The transaction that it belongs to.
    pub tid: u32,
    /// [`CLIENT_TRANSACTION`] or [`CLIENT_LOG`]. Recovery takes either, and refuses another.
    pub client: u8,
    /// What it is.
    pub flags: XfsOpFlags,
    /// A region or a piece of one.
    pub data: &'a [u8],
}

/// The ops of the unpacked body of a record.
#[derive(Clone, Debug)]
pub struct XfsLogOps<'a> {
    rest: &'a [u8],
    count: u32,
}

/// The first `count` ops of `body`, the unpacked body of a record. The iterator ends behind an
/// error, and at the end of the body even where the header of the record counts more ops.
#[must_use]
pub fn ops(body: &[u8], count: u32) -> XfsLogOps<'_> {
    XfsLogOps { rest: body, count }
}

impl<'a> XfsLogOps<'a> {
    fn read(&mut self) -> Result<XfsLogOp<'a>, Malformed> {
        let Ok((header, rest)) = OpHeader::ref_from_prefix(self.rest) else {
            return Err(bad_record(format!("an op in the last {} bytes", self.rest.len())));
        };
        let len = header.len.get() as usize;
        let Some((data, rest)) = rest.split_at_checked(len) else {
            return Err(bad_record(format!("an op of {len} bytes in the last {}", rest.len())));
        };
        self.rest = rest;
        Ok(XfsLogOp {
            tid: header.tid.get(),
            client: header.clientid,
            flags: XfsOpFlags::from_bits_retain(header.flags),
            data,
        })
    }
}

impl<'a> Iterator for XfsLogOps<'a> {
    type Item = Result<XfsLogOp<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        self.count = self.count.checked_sub(1)?;
        let op = self.read();
        if op.is_err() {
            self.count = 0;
        }
        Some(op)
    }
}

/// What the header of a transaction says. Recovery needs none of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XfsTransactionHeader {
    /// The transaction.
    pub tid: u32,
    /// How many regions its items have.
    pub regions: u32,
}

impl XfsTransactionHeader {
    /// The bytes of the header.
    pub const LEN: usize = 16;

    /// The header that `region` holds.
    ///
    /// # Errors
    /// When it has another length or magic.
    pub fn parse(region: &[u8]) -> Result<Self, Malformed> {
        let Ok(words) = <[[u8; 4]; 4]>::ref_from_bytes(region) else {
            return Err(bad_record(format!("a transaction header of {} bytes", region.len())));
        };
        let [magic, _, tid, regions] = words.map(u32::from_le_bytes);
        if magic != TRANSACTION_MAGIC {
            return Err(bad_record(format!(
                "transaction header {TRANSACTION_MAGIC:#x} expected, {magic:#x} found"
            )));
        }
        Ok(Self { tid, regions })
    }

    /// The bytes of the header.
    #[must_use]
    pub fn encode(self) -> [u8; Self::LEN] {
        let words = [TRANSACTION_MAGIC, CHECKPOINT, self.tid, self.regions].map(u32::to_le_bytes);
        let mut bytes = [0; Self::LEN];
        bytes.as_chunks_mut().0.copy_from_slice(&words);
        bytes
    }
}

/// Writes ops into the body of one record.
#[derive(Debug)]
pub struct XfsOpWriter<'a> {
    body: &'a mut [u8],
    used: usize,
    count: u32,
}

impl<'a> XfsOpWriter<'a> {
    /// A writer of ops into `body`, of which the first `used` bytes hold `count` ops already.
    #[must_use]
    pub fn new(body: &'a mut [u8], used: usize, count: u32) -> Self {
        let used = used.min(body.len());
        Self { body, used, count }
    }

    /// The bytes that are used.
    #[must_use]
    pub fn used(&self) -> usize {
        self.used
    }

    /// The ops that the body holds.
    #[must_use]
    pub fn count(&self) -> u32 {
        self.count
    }

    /// The bytes of data that one more op can carry; `None` when it has no room for a header.
    #[must_use]
    pub fn room(&self) -> Option<usize> {
        (self.body.len() - self.used).checked_sub(OP_HEADER)
    }

    /// Writes the op that begins a transaction. Returns false when it does not fit.
    #[must_use]
    pub fn start(&mut self, tid: u32) -> bool {
        self.put(tid, CLIENT_TRANSACTION, XfsOpFlags::START, &[])
    }

    /// Writes the op that completes a transaction. Returns false when it does not fit.
    #[must_use]
    pub fn commit(&mut self, tid: u32) -> bool {
        self.put(tid, CLIENT_TRANSACTION, XfsOpFlags::COMMIT, &[])
    }

    /// Writes the op that ends a clean log. It is alone in its record. Returns false when it does
    /// not fit.
    #[must_use]
    pub fn unmount(&mut self, tid: u32) -> bool {
        let mut data = [0; 8];
        data[..2].copy_from_slice(&UNMOUNT_MAGIC.to_le_bytes());
        self.put(tid, CLIENT_LOG, XfsOpFlags::UNMOUNT, &data)
    }

    /// Writes what fits of `region`, whose first `done` bytes are in records before this one.
    /// Returns how many are in the log then: the region goes on in the next record while they are
    /// fewer than it has.
    ///
    /// A piece is a multiple of 4 bytes and may have only 4: the kernel writes such too. For
    /// example, a region of 100 bytes at the end of a body with 72 left becomes a piece of 60
    /// bytes here, and one of 40 in the next record.
    #[must_use]
    pub fn region(&mut self, tid: u32, region: &[u8], done: usize) -> usize {
        let rest = region.get(done..).unwrap_or_default();
        let room = self.room().unwrap_or(0) & !3;
        let len = rest.len().min(room);
        if len == 0 {
            return done;
        }
        let mut flags = XfsOpFlags::empty();
        if done > 0 {
            flags |= XfsOpFlags::CONTINUED;
        }
        if len < rest.len() {
            flags |= XfsOpFlags::CONTINUES;
        } else if done > 0 {
            flags |= XfsOpFlags::LAST;
        }
        let fits = self.put(tid, CLIENT_TRANSACTION, flags, rest.get(..len).unwrap_or_default());
        if fits { done + len } else { done }
    }

    fn put(&mut self, tid: u32, client: u8, flags: XfsOpFlags, data: &[u8]) -> bool {
        let len = match u32::try_from(data.len()) {
            Ok(len) if len <= BUFFER_MAX => len,
            _ => return false,
        };
        let place = self.body.get_mut(self.used..).unwrap_or_default();
        let Some((header, rest)) = place.split_at_mut_checked(OP_HEADER) else { return false };
        let Some(place) = rest.get_mut(..data.len()) else { return false };
        let fields = OpHeader {
            tid: U32::new(tid),
            len: U32::new(len),
            clientid: client,
            flags: flags.bits(),
            res2: U16::ZERO,
        };
        header.copy_from_slice(fields.as_bytes());
        place.copy_from_slice(data);
        self.used += OP_HEADER + data.len();
        self.count += 1;
        true
    }
}
