//! A device that fails on purpose.
//!
//! Faults live in the device, so that every layer above can be tested with them and
//! none needs a hook of its own.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::BlockDevice;

/// What goes wrong in a range of a [`FaultDevice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Reads that touch the range fail with `EIO`.
    Error,
    /// Reads return the range with every byte inverted, as a silent corruption does.
    Garbage,
}

/// A device over another one, with faults in some ranges.
#[derive(Debug)]
pub struct FaultDevice {
    below: Arc<dyn BlockDevice>,
    faults: Mutex<Vec<(Range<u64>, Fault)>>,
}

impl FaultDevice {
    /// A device that passes everything through to `below` until a fault is added.
    #[must_use]
    pub fn new(below: Arc<dyn BlockDevice>) -> Self {
        Self { below, faults: Mutex::default() }
    }

    /// Makes all bytes of `range` faulty from now on.
    pub fn add(&self, range: Range<u64>, fault: Fault) {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).push((range, fault));
    }
}

impl BlockDevice for FaultDevice {
    fn name(&self) -> &str {
        self.below.name()
    }

    fn size_bytes(&self) -> u64 {
        self.below.size_bytes()
    }

    fn read_at(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.below.read_at(offset, buf)?;
        let end = offset + buf.len() as u64;
        for (range, fault) in self.faults.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            let hit = range.start.max(offset)..range.end.min(end);
            if hit.is_empty() {
                continue;
            }
            match fault {
                Fault::Error => return Err(io::Error::other("fault injected by a test")),
                Fault::Garbage => {
                    for at in hit {
                        #[expect(
                            clippy::cast_possible_truncation,
                            reason = "`at - offset` is below `buf.len()`, a usize"
                        )]
                        let byte = &mut buf[(at - offset) as usize];
                        *byte = !*byte;
                    }
                }
            }
        }
        Ok(())
    }
}
