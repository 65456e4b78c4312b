//! Bytes in memory that begin at a page, so that direct I/O takes them without a copy.

use std::ops::{Deref, DerefMut};

use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The alignment that direct I/O needs on most hosts, in bytes.
const PAGE_BYTES: usize = 4096;

#[derive(Clone, Copy, FromBytes, Immutable, IntoBytes)]
#[repr(C, align(4096))]
struct MemoryPage([u8; PAGE_BYTES]);

/// Bytes that begin at a page of memory.
#[derive(Clone, Default)]
pub(crate) struct PageBytes {
    /// The last page is zeros behind the bytes.
    pages: Vec<MemoryPage>,
    len: usize,
}

impl PageBytes {
    /// The bytes of `parts`, one behind the other.
    pub(crate) fn of(parts: &[&[u8]]) -> Self {
        let mut all = Self::default();
        all.append(parts);
        all
    }

    /// Adds the bytes of `parts`.
    pub(crate) fn append(&mut self, parts: &[&[u8]]) {
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

impl Deref for PageBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.pages.as_bytes()[..self.len]
    }
}

impl DerefMut for PageBytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.pages.as_mut_bytes()[..self.len]
    }
}

impl std::fmt::Debug for PageBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.len)
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
            let (mut pages, mut model) = (PageBytes::default(), Vec::new());
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
                assert!(pages.as_ptr().addr().is_multiple_of(PAGE_BYTES));
            }
            assert!(*pages.clone() == model[..]);
        }
    }
}
