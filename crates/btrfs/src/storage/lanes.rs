//! Requests to several members at a time ([`offshoot_kit::lanes`]).
//!
//! Readers and writers have lanes of their own, so that reads never keep a barrier waiting.

use std::io::{self, IoSlice};
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_kit::lanes::Lanes;
use offshoot_vfs::{Error, Result};
use smallvec::SmallVec;
use tracing::debug;

use super::{DeviceError, Member, Storage};
use crate::events::{DEVICE, clock, micros};

/// The lanes of a volume: for each direction, one for each member but one.
pub(super) struct MemberLanes {
    pub(super) reads: Lanes,
    writes: Lanes,
}

impl MemberLanes {
    pub(super) fn new(members: &[Member]) -> Self {
        let most = members.len().saturating_sub(1);
        Self { reads: Lanes::new(most), writes: Lanes::new(most) }
    }
}

/// What one member is to write, in this order.
pub(crate) struct MemberWrites<B> {
    member: usize,
    device: Arc<dyn BlockDevice>,
    writes: Arc<[MemberWrite<B>]>,
}

/// Bytes that are written one behind the other at an offset of a member.
pub(crate) struct MemberWrite<B> {
    pub(crate) offset: u64,
    pub(crate) bytes: Vec<B>,
}

impl<B> Clone for MemberWrites<B> {
    fn clone(&self) -> Self {
        let Self { member, device, writes } = self;
        Self { member: *member, device: device.clone(), writes: writes.clone() }
    }
}

impl<B> MemberWrites<B> {
    /// The index of the member.
    pub(crate) fn member(&self) -> usize {
        self.member
    }
}

impl<B: AsRef<[u8]>> MemberWrites<B> {
    /// Tries every write, whatever became of those before it.
    fn write(&self) -> Vec<io::Result<()>> {
        let write = |write: &MemberWrite<B>| {
            let bufs: Vec<_> = write.bytes.iter().map(|b| IoSlice::new(b.as_ref())).collect();
            self.device.write_vectored_at(write.offset, &bufs)
        };
        self.writes.iter().map(write).collect()
    }
}

/// The error of a write to `device`.
fn write_error(device: &dyn BlockDevice, offset: u64, error: io::Error) -> Error {
    Error::io(format!("{}: writing at {offset}", device.name()), error)
}

impl Storage {
    /// Writes for the member at `index`.
    pub(crate) fn writes_to<B>(
        &self,
        index: usize,
        writes: impl IntoIterator<Item = MemberWrite<B>>,
    ) -> Result<MemberWrites<B>> {
        let (device, writes) = (self.device(index)?.clone(), writes.into_iter().collect());
        Ok(MemberWrites { member: index, device, writes })
    }

    /// The device of the member at `index`.
    ///
    /// # Errors
    /// When it is missing.
    fn device(&self, index: usize) -> Result<&Arc<dyn BlockDevice>> {
        let member = &self.members()[index];
        let missing =
            || Error::io(format!("writing to {}", member.name()), offshoot_vfs::Errno::NXIO);
        member.device.as_ref().ok_or_else(missing)
    }

    /// Writes `bufs` one behind the other at `offset` of the member at `index`.
    pub(crate) fn write_member(
        &self,
        index: usize,
        offset: u64,
        bufs: &[IoSlice<'_>],
    ) -> Result<()> {
        let device = self.device(index)?;
        let written = device.write_vectored_at(offset, bufs);
        written.map_err(|error| write_error(&**device, offset, error))
    }

    /// Writes to several members at a time. `take` gets the number of each share, the number of
    /// each write in it, and the outcome, in their order.
    pub(crate) fn write_members<B: AsRef<[u8]> + Send + Sync + 'static>(
        &self,
        shares: &[MemberWrites<B>],
        mut take: impl FnMut(usize, usize, Result<()>),
    ) {
        self.lanes.writes.run(shares, MemberWrites::write, |share, outcomes| {
            let MemberWrites { device, writes, .. } = &shares[share];
            for (write, outcome) in outcomes.into_iter().enumerate() {
                let offset = writes[write].offset;
                take(share, write, outcome.map_err(|e| write_error(&**device, offset, e)));
            }
        });
    }

    /// Sends a barrier to all members that have not failed, at a time. A member whose barrier fails
    /// has failed, if the volume can do without it.
    ///
    /// # Errors
    /// The first error of a member that the volume needs.
    pub(crate) fn flush_members(&self) -> Result<()> {
        let is_written = |(_, member): &(usize, &Member)| !member.has_failed();
        let written = self.members().iter().enumerate().filter(is_written);
        let devices: SmallVec<[(usize, Arc<dyn BlockDevice>); 1]> =
            written.filter_map(|(index, member)| Some((index, member.device.clone()?))).collect();
        let mut result = Ok(());
        self.lanes.writes.run(&devices, flush, |number, flushed| {
            if let Err(error) = flushed {
                let (index, device) = &devices[number];
                let error = Error::io(format!("{}: flushing", device.name()), error);
                let survived = self.survive_failure(*index, DeviceError::Flush, error);
                if result.is_ok() {
                    result = survived;
                }
            }
        });
        result
    }
}

/// Sends a barrier to a device.
fn flush((_, device): &(usize, Arc<dyn BlockDevice>)) -> io::Result<()> {
    let clock = clock!(DEVICE, DEBUG);
    debug!(target: DEVICE, device = device.name(), "waiting for the barrier");
    let flushed = device.flush();
    debug!(target: DEVICE, us = micros(clock), "the barrier is done");
    flushed
}
