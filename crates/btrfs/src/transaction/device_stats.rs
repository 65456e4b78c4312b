//! What the trees record about devices. The device tree has an item with error counters, in the
//! same form as the kernel's, for each member that had an error. The chunk tree notes that a member
//! has failed (`storage/failing`).

use offshoot_btrfs_format::key::objectid;
use offshoot_btrfs_format::space::DevStatsItem;
use offshoot_btrfs_format::{ItemType, Key, TreeId, U64};
use offshoot_vfs::{Errno, Error, Result};
use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::Base;
use super::{LiveVolume, TransactionHandle};
use crate::space::Claim;
use crate::storage::DeviceError;

impl Base {
    /// Makes the running transaction note the members that failed and are not noted yet. The caller
    /// holds the commit lock and no handle.
    ///
    /// # Errors
    /// When there is no room, or the chunk tree cannot be changed. Then all writing ends.
    pub(super) fn note_failures(&self, live: &LiveVolume) -> Result<()> {
        for index in self.storage.failures_to_note() {
            let handle = self.try_join(live, live.space.chunk_items(), Claim::LastResort)?;
            live.all_or_stop(|| {
                if let Some(handle) = &handle
                    && handle.note_failed(index)?
                {
                    return Ok(());
                }
                let name = self.members()[index].name();
                let what = format!("noting that {name} has failed");
                Err(Error::posix(Errno::NOSPC, what))
            })?;
            self.storage.failure_is_noted(index);
        }
        Ok(())
    }

    /// Adds new errors to the stored counters. If there is no room, the next commit does it. The
    /// caller holds no handle.
    ///
    /// # Errors
    /// When the device tree cannot be read or changed.
    pub(super) fn store_device_errors(&self, live: &LiveVolume) -> Result<()> {
        for (index, member) in self.members().iter().enumerate() {
            if !member.has_errors() {
                continue;
            }
            let Some(handle) = self.try_join(live, 1, Claim::LastResort)? else { return Ok(()) };
            let key = Key::new(objectid::DEV_STATS, ItemType::PERSISTENT_ITEM, member.id.0);
            handle.add_errors(key, self.storage.take_errors(index))?;
        }
        Ok(())
    }
}

impl TransactionHandle<'_> {
    fn add_errors(&self, key: Key, errors: [u64; DeviceError::COUNTERS]) -> Result<()> {
        let [write, read, flush, corruption, generation] = errors;
        let add = |counter: &mut U64, more: u64| {
            *counter = counter.get().saturating_add(more).into();
        };
        self.change(TreeId::DEV, |tree| {
            tree.modify(key, size_of::<DevStatsItem>(), |stored| {
                // A later kernel may have more counters.
                let mut bytes = stored.map(<[u8]>::to_vec).unwrap_or_default();
                bytes.resize(bytes.len().max(size_of::<DevStatsItem>()), 0);
                let mut item = DevStatsItem::new_zeroed();
                if let Ok((known, _)) = DevStatsItem::read_from_prefix(&bytes) {
                    item = known;
                }
                add(&mut item.write_errs, write);
                add(&mut item.read_errs, read);
                add(&mut item.flush_errs, flush);
                add(&mut item.corruption_errs, corruption);
                add(&mut item.generation_errs, generation);
                bytes[..size_of::<DevStatsItem>()].copy_from_slice(item.as_bytes());
                Ok(bytes)
            })
        })
    }
}
