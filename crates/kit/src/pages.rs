//! Bytes in memory that begin at a page if they are many, so that direct I/O takes them without a
//! copy.

use std::ops::{Deref, DerefMut};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The alignment that direct I/O needs on most hosts, in bytes.
const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct MemoryPage([u8; PAGE_BYTES]);

/// The least bytes that are aligned. An allocator may need one more page for each aligned piece,
/// so here at most a quarter of the bytes.
const LEAST_BYTES: usize = 4 * PAGE_BYTES;

/// Bytes that begin at a page of memory if they are many.
#[derive(Clone)]
pub enum AlignedBytes {
    /// Fewer than four pages.
    Short(Vec<u8>),
    /// The rest.
    Long(MemoryPages),
}

/// Bytes that begin at a page of memory.
#[derive(Clone, Default)]
pub struct MemoryPages {
    /// The last page is zeros behind the bytes.
    pages: Vec<MemoryPage>,
    len: usize,
}

impl AlignedBytes {
    /// The bytes of `parts`, one behind the other.
    #[must_use]
    pub fn of(parts: &[&[u8]]) -> Self {
        let mut all = Self::Short(Vec::new());
        all.append(parts);
        all
    }

    /// Adds the bytes of `parts`.
    pub fn append(&mut self, parts: &[&[u8]]) {
        let more: usize = parts.iter().map(|part| part.len()).sum();
        match self {
            Self::Short(bytes) if bytes.len() + more < LEAST_BYTES => {
                bytes.reserve(more);
                for part in parts {
                    bytes.extend_from_slice(part);
                }
            }
            Self::Short(bytes) => {
                let mut pages = MemoryPages::default();
                pages.append(&[&[&bytes[..]], parts].concat());
                *self = Self::Long(pages);
            }
            Self::Long(pages) => pages.append(parts),
        }
    }
}

impl MemoryPages {
    fn append(&mut self, parts: &[&[u8]]) {
        let more: usize = parts.iter().map(|part| part.len()).sum();
        self.pages.reserve((self.len + more).div_ceil(PAGE_BYTES) - self.pages.len());
        for part in parts {
            self.append_one(part);
        }
    }

    fn append_one(&mut self, bytes: &[u8]) {
        let room = self.pages.as_mut_bytes().get_mut(self.len..).unwrap_or_default();
        let (first, rest) = bytes.split_at(bytes.len().min(room.len()));
        room[..first.len()].copy_from_slice(first);
        let (whole, last) = rest.as_chunks::<PAGE_BYTES>();
        self.pages.extend(whole.iter().map(|page| MemoryPage(*page)));
        if !last.is_empty() {
            let mut page = MemoryPage([0; PAGE_BYTES]);
            page.0[..last.len()].copy_from_slice(last);
            self.pages.push(page);
        }
        self.len += bytes.len();
    }
}

impl Deref for AlignedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(MemoryPages { pages, len }) => &pages.as_bytes()[..*len],
        }
    }
}

impl DerefMut for AlignedBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Short(bytes) => bytes,
            Self::Long(MemoryPages { pages, len }) => &mut pages.as_mut_bytes()[..*len],
        }
    }
}

impl std::fmt::Debug for AlignedBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

#[cfg(test)]
mod tests {
    use offshoot_testkit::random::{Random, seed_of_run};

    use super::*;

    #[test]
    fn what_is_appended_is_there_and_begins_at_a_page() {
        let mut random = Random::new(seed_of_run());
        for _ in 0..200 {
            let (mut pages, mut model) = (AlignedBytes::of(&[]), Vec::new());
            for _ in 0..random.below(6) {
                let parts = [(); 3].map(|()| {
                    let most =
                        [1, 10, 4096, 4097, 20_000][usize::try_from(random.below(5)).unwrap()];
                    let len = usize::try_from(random.below(most + 1)).unwrap();
                    random.bytes(len)
                });
                pages.append(&parts.each_ref().map(|part| &part[..]));
                model.extend(parts.concat());
                assert!(*pages == model[..], "{} bytes", model.len());
                let is_aligned = pages.as_ptr().addr().is_multiple_of(PAGE_BYTES);
                assert!(is_aligned || model.len() < LEAST_BYTES, "{} bytes", model.len());
            }
            assert!(*pages.clone() == model[..]);
        }
    }

    /// The distances in memory between many pieces show what the allocator needs for one.
    #[test]
    fn small_pieces_take_little_more_than_their_bytes() {
        for len in [1, 2, 3, 4, 5, 8, 16].map(|pages| pages * PAGE_BYTES) {
            let pieces = [(); 500].map(|()| AlignedBytes::of(&[&vec![1; len]]));
            let mut starts = pieces.each_ref().map(|piece| piece.as_ptr().addr());
            starts.sort_unstable();
            let mut distances: Vec<_> = starts.windows(2).map(|two| two[1] - two[0]).collect();
            distances.sort_unstable();
            let usual = distances[distances.len() / 2];
            assert!(usual <= len + len / 4 + 64, "{usual} bytes for {len}");
        }
    }
}
