//! The vectors of an item.
//!
//! Memory is taken before the context lock, and formatting under it allocates nothing. A buffer
//! that gets one more chunk of 128 bytes at each commit would need a larger vector each time, 32
//! times for 4 KiB. So the size that is asked for is rounded up to 512 bytes, behind 128 for the
//! first region, and 4 KiB take at most 8 vectors. The size that is formatted and accounted is
//! exact.
//!
//! An item that is committed again in its context has a vector there. If the regions stay as long,
//! only what changed is copied over: of a block whose 32 chunks are all dirty, often two or three.
//! Debug builds compare the vector with a fresh one.

use offshoot_kit::counter::count;
use offshoot_xfs_format::log::XfsLogVector;

use super::item::{LoggedItem, LoggedSize};
use super::statistics::LogCounters;

/// What the first region of a buffer has room for before a size is rounded.
const FIRST_REGION: usize = 128;

/// The regions that a vector has room for are rounded up to a multiple of these.
const REGIONS_ROUND: usize = 8;

/// What a context has of an item.
#[derive(Debug)]
struct FormattedVector {
    /// The sequence of the context.
    sequence: u64,
    vector: XfsLogVector,
}

/// The vectors of an item.
#[derive(Debug, Default)]
pub(super) struct LoggedVectors {
    /// The newest context that has the item, and what it has unless that is in the log already.
    current: Option<FormattedVector>,
    /// What the context before has, while that is being written.
    earlier: Option<FormattedVector>,
    spare: Option<XfsLogVector>,
    /// The newest context that has the item, 0 for none, and the place of the item in its list.
    pub(super) sequence: u64,
    pub(super) slot: usize,
    /// Whether the list has it as an item that goes home.
    pub(super) goes_home: bool,
}

/// What formatting an item did.
#[derive(Clone, Copy, Debug)]
pub(super) struct FormatOutcome {
    /// The size that the context had of the item; `None` when it had none.
    pub(super) before: Option<LoggedSize>,
    pub(super) now: LoggedSize,
}

fn size_of(vector: &XfsLogVector) -> LoggedSize {
    LoggedSize { bytes: vector.byte_count(), regions: vector.regions().len() }
}

fn fits(vector: &XfsLogVector, size: LoggedSize) -> bool {
    vector.capacity() >= size.bytes && vector.region_capacity() >= size.regions
}

/// Whether a vector has what the item formats now.
fn is_formatted(vector: &XfsLogVector, item: &dyn LoggedItem) -> bool {
    let mut fresh = XfsLogVector::default();
    item.format(&mut fresh);
    *vector == fresh
}

impl LoggedVectors {
    /// Takes the memory to format `size` for context `sequence`.
    pub(super) fn make_room(
        &mut self,
        sequence: u64,
        size: LoggedSize,
        round: usize,
        counters: &LogCounters,
    ) {
        let current = self.current.as_ref();
        let is_in_place = current
            .is_some_and(|current| current.sequence == sequence && fits(&current.vector, size));
        let has_spare = self.spare.as_ref().is_some_and(|spare| fits(spare, size));
        if is_in_place || has_spare || size == LoggedSize::default() {
            return;
        }
        let rounded = size.bytes.saturating_sub(FIRST_REGION).next_multiple_of(round.max(1));
        // The second vector of an item begins with the size of the first.
        let (bytes, regions) = current.map_or((0, 0), |current| {
            (current.vector.capacity(), current.vector.region_capacity())
        });
        let bytes = bytes.max(rounded + FIRST_REGION);
        let regions = regions.max(size.regions.next_multiple_of(REGIONS_ROUND));
        self.spare = Some(XfsLogVector::with_capacity(bytes, regions));
        count(&counters.shadow_allocations, 1);
        count(&counters.shadow_bytes, bytes as u64);
    }

    /// Formats the item for context `sequence`, for which [`Self::make_room`] was called.
    pub(super) fn format(
        &mut self,
        sequence: u64,
        item: &dyn LoggedItem,
        size: LoggedSize,
        counters: &LogCounters,
    ) -> FormatOutcome {
        count(&counters.formats, 1);
        let mut before = None;
        let mut vector = None;
        match self.current.take() {
            Some(mut current) if current.sequence == sequence => {
                before = Some(size_of(&current.vector));
                if !fits(&current.vector, size) {
                    vector = self.spare.replace(current.vector);
                } else if before == Some(size) && item.patch(&mut current.vector) {
                    count(&counters.patches, 1);
                    debug_assert!(is_formatted(&current.vector, item), "{item:?}");
                    self.current = Some(current);
                    return FormatOutcome { before, now: size };
                } else {
                    count(&counters.formats_in_place, 1);
                    vector = Some(current.vector);
                }
            }
            Some(current) => self.earlier = Some(current),
            None => {}
        }
        let mut vector = vector.or_else(|| self.spare.take()).unwrap_or_default();
        vector.clear();
        let capacity = vector.capacity();
        item.format(&mut vector);
        let now = size_of(&vector);
        debug_assert_eq!((now, vector.capacity()), (size, capacity), "{item:?}");
        self.current = Some(FormattedVector { sequence, vector });
        FormatOutcome { before, now }
    }

    /// Takes what context `sequence` has of the item.
    pub(super) fn take(&mut self, sequence: u64) -> Option<XfsLogVector> {
        let has = |formatted: &mut FormattedVector| formatted.sequence == sequence;
        let taken = self.current.take_if(has).or_else(|| self.earlier.take_if(has));
        taken.map(|formatted| formatted.vector)
    }

    /// Gives a vector back whose bytes are in the log.
    pub(super) fn give_back(&mut self, vector: XfsLogVector) {
        let is_larger =
            self.spare.as_ref().is_none_or(|spare| spare.capacity() < vector.capacity());
        if is_larger {
            self.spare = Some(vector);
        }
    }
}
