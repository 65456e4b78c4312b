//! Writing items home.

use std::collections::HashSet;
use std::io::IoSlice;
use std::ops::Deref;
use std::sync::Arc;

use foldhash::fast::RandomState;
use offshoot_device::BlockDevice;
use offshoot_vfs::{Error, Result};
use offshoot_xfs_format::BasicBlock;

use super::item::{ActivePlace, LoggedItem};
use crate::buffer::XfsBuffer;

/// The most slices of one request. Linux takes 1024.
const MOST_SLICES: usize = 256;

/// What is to be written to a place.
pub(crate) enum HomeBytes {
    Own(Vec<u8>),
    /// The bytes that readers find.
    Shared(Arc<XfsBuffer>),
}

impl From<Vec<u8>> for HomeBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Own(bytes)
    }
}

impl From<Arc<XfsBuffer>> for HomeBytes {
    fn from(buffer: Arc<XfsBuffer>) -> Self {
        Self::Shared(buffer)
    }
}

impl Deref for HomeBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Own(bytes) => bytes,
            Self::Shared(buffer) => buffer.bytes(),
        }
    }
}

/// A piece of the device that is to be written, and the items whose changes it holds.
struct HomeWrite {
    place: BasicBlock,
    bytes: HomeBytes,
    items: Vec<(Arc<dyn LoggedItem>, ActivePlace)>,
}

/// Bytes that are to be written home together.
#[derive(Default)]
pub(crate) struct HomeWrites {
    writes: Vec<HomeWrite>,
    /// Where they begin.
    places: HashSet<BasicBlock, RandomState>,
}

impl HomeWrites {
    /// Whether an item is in the bytes for `place`. A cluster of inodes is added for the first of
    /// them, and holds the others too: those whose bytes are on their way.
    pub(crate) fn has_item(&self, place: BasicBlock, is_on_its_way: bool) -> bool {
        is_on_its_way && self.places.contains(&place)
    }

    /// Adds `bytes`, complete with LSN and checksum, which hold all changes of `items`. The caller
    /// holds the locks of all of them, and none is pinned.
    pub(crate) fn add(
        &mut self,
        place: BasicBlock,
        bytes: impl Into<HomeBytes>,
        items: &[Arc<dyn LoggedItem>],
    ) {
        // No thread makes an item active again that is unpinned and locked.
        let active = |item: &Arc<dyn LoggedItem>| {
            let place = *item.state().active.lock();
            place.map(|place| (item.clone(), place))
        };
        let items = items.iter().filter_map(active).collect();
        self.places.insert(place);
        self.writes.push(HomeWrite { place, bytes: bytes.into(), items });
    }

    /// Writes all of it, in the order of the device. Returns the items that are home now, with
    /// their places in the list of active ones when their bytes were taken.
    pub(super) fn write(
        mut self,
        device: &dyn BlockDevice,
    ) -> Result<Vec<(Arc<dyn LoggedItem>, ActivePlace)>> {
        // Of two writes to one place the later one has to stay the later one: the sort is stable.
        self.writes.sort_by_key(|write| write.place.0);
        let mut writes = self.writes.iter().peekable();
        while let Some(first) = writes.next() {
            let (mut slices, mut end) = (vec![IoSlice::new(&first.bytes)], end_of(first));
            while slices.len() < MOST_SLICES
                && let Some(next) = writes.next_if(|next| next.place.bytes() == end)
            {
                slices.push(IoSlice::new(&next.bytes));
                end = end_of(next);
            }
            let at = first.place.bytes();
            device.write_vectored_at(at, &slices).map_err(|error| {
                Error::io(format!("writing at {at} of {}", device.name()), error)
            })?;
        }
        Ok(self.writes.into_iter().flat_map(|write| write.items).collect())
    }
}

fn end_of(write: &HomeWrite) -> u64 {
    write.place.bytes() + write.bytes.len() as u64
}
