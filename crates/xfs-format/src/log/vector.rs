//! Regions of bytes, one behind the other in one buffer.

/// Regions of bytes that lie one behind the other in one buffer: the form in which items are
/// written to the log, and in which they are read from it.
///
/// The buffer keeps its memory when it is cleared, so that an item of at most the same size is
/// formatted again without an allocation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XfsLogVector {
    bytes: Vec<u8>,
    /// Where each region ends.
    ends: Vec<u32>,
}

impl XfsLogVector {
    /// An empty vector with memory for `regions` regions of `bytes` bytes in all.
    #[must_use]
    pub fn with_capacity(bytes: usize, regions: usize) -> Self {
        Self { bytes: Vec::with_capacity(bytes), ends: Vec::with_capacity(regions) }
    }

    /// Removes all regions, and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.ends.clear();
    }

    /// Adds a region that consists of `parts`, padded with zeros to a multiple of 4 bytes.
    ///
    /// # Panics
    /// When the vector would reach 4 GiB; the largest log has 2.
    pub fn push(&mut self, parts: &[&[u8]]) {
        let start = self.bytes.len();
        for part in parts {
            self.bytes.extend_from_slice(part);
        }
        let len = (self.bytes.len() - start).next_multiple_of(4);
        self.bytes.resize(start + len, 0);
        self.ends.push(u32::try_from(self.bytes.len()).expect("no log has 4 GiB"));
    }

    /// Overwrites bytes from `at` on, counted from the beginning of the first region. Returns
    /// false, and changes nothing, when the vector ends before.
    pub fn overwrite(&mut self, at: usize, new: &[u8]) -> bool {
        let part = at.checked_add(new.len()).and_then(|end| self.bytes.get_mut(at..end));
        part.map(|part| part.copy_from_slice(new)).is_some()
    }

    /// Adds a region as it is. Returns false, and adds nothing, when the vector would reach 4 GiB.
    pub(super) fn push_read(&mut self, region: &[u8]) -> bool {
        let end = u32::try_from(self.bytes.len() + region.len()).ok();
        end.inspect(|&end| {
            self.bytes.extend_from_slice(region);
            self.ends.push(end);
        })
        .is_some()
    }

    /// Makes the last region longer. Returns false when there is none, or at 4 GiB.
    pub(super) fn extend_last(&mut self, piece: &[u8]) -> bool {
        let end = u32::try_from(self.bytes.len() + piece.len()).ok();
        let (Some(end), Some(last)) = (end, self.ends.last_mut()) else { return false };
        self.bytes.extend_from_slice(piece);
        *last = end;
        true
    }

    /// The bytes of all regions.
    #[must_use]
    pub fn byte_count(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes that the vector holds without an allocation.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.bytes.capacity()
    }

    /// The regions that the vector holds without an allocation.
    #[must_use]
    pub fn region_capacity(&self) -> usize {
        self.ends.capacity()
    }

    /// All regions.
    #[must_use]
    pub fn regions(&self) -> XfsRegions<'_> {
        XfsRegions { bytes: &self.bytes, ends: &self.ends, start: 0 }
    }
}

/// Some regions of an [`XfsLogVector`].
#[derive(Clone, Copy, Debug)]
pub struct XfsRegions<'a> {
    bytes: &'a [u8],
    ends: &'a [u32],
    /// Where the first one begins.
    start: u32,
}

/// Regions are equal when their bytes are, wherever they lie.
impl PartialEq for XfsRegions<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for XfsRegions<'_> {}

impl<'a> XfsRegions<'a> {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Region `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&'a [u8]> {
        let end = *self.ends.get(index)?;
        let start = match index.checked_sub(1) {
            Some(before) => *self.ends.get(before)?,
            None => self.start,
        };
        self.bytes.get(start as usize..end as usize)
    }

    /// All of them, in order.
    pub fn iter(self) -> impl Iterator<Item = &'a [u8]> {
        (0..self.len()).filter_map(move |index| self.get(index))
    }

    /// The first `count` regions and the others; `None` when there are fewer.
    #[must_use]
    pub fn split_at(self, count: usize) -> Option<(Self, Self)> {
        let (first, rest) = self.ends.split_at_checked(count)?;
        let start = first.last().copied().unwrap_or(self.start);
        Some((Self { ends: first, ..self }, Self { ends: rest, start, ..self }))
    }
}
