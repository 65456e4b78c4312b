//! Which parts of a buffer have changed, in chunks of 128 bytes.

use std::ops::Range;

use offshoot_xfs_format::log::items::CHUNK;
use zerocopy::little_endian as le;

/// The chunks of a word of the map.
const WORD_CHUNKS: usize = 32;

/// One bit for each chunk of a buffer, as an item of the log has them: one word up to 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum DirtyChunks {
    One([le::U32; 1]),
    Several(Box<[le::U32]>),
}

impl DirtyChunks {
    /// The map of a buffer of `len` bytes, without a chunk.
    pub(super) fn new(len: usize) -> Self {
        match len.div_ceil(CHUNK * WORD_CHUNKS) {
            0 | 1 => Self::One([le::U32::ZERO]),
            words => Self::Several(vec![le::U32::ZERO; words].into()),
        }
    }

    fn words_mut(&mut self) -> &mut [le::U32] {
        match self {
            Self::One(word) => word,
            Self::Several(words) => words,
        }
    }

    /// Adds the chunks with these bytes. What lies behind the buffer is left out.
    pub(super) fn add(&mut self, bytes: Range<usize>) {
        let (first, end) = (bytes.start / CHUNK, bytes.end.div_ceil(CHUNK));
        let words = self.words_mut().iter_mut().enumerate();
        let words = words.take(end.div_ceil(WORD_CHUNKS)).skip(first / WORD_CHUNKS);
        for (index, word) in words {
            let start = index * WORD_CHUNKS;
            let (from, to) = (first.saturating_sub(start), (end - start).min(WORD_CHUNKS));
            let chunks = (u32::MAX << from) & (u32::MAX >> (WORD_CHUNKS - to));
            *word = le::U32::new(word.get() | chunks);
        }
    }

    /// Adds the chunks of another map of the buffer.
    pub(super) fn merge(&mut self, other: &Self) {
        for (word, more) in self.words_mut().iter_mut().zip(other.words()) {
            *word = le::U32::new(word.get() | more.get());
        }
    }

    /// Makes the map the same as another one of the buffer.
    pub(super) fn copy_from(&mut self, other: &Self) {
        for (word, new) in self.words_mut().iter_mut().zip(other.words()) {
            *word = *new;
        }
    }

    /// The map of a part of the buffer.
    pub(super) fn part(&self, bytes: Range<usize>) -> Self {
        let mut part = Self::new(bytes.len());
        let first = bytes.start / CHUNK;
        for chunk in 0..bytes.len() / CHUNK {
            let (word, bit) = ((first + chunk) / WORD_CHUNKS, (first + chunk) % WORD_CHUNKS);
            if self.words().get(word).is_some_and(|word| word.get() >> bit & 1 != 0) {
                part.add(chunk * CHUNK..(chunk + 1) * CHUNK);
            }
        }
        part
    }

    pub(super) fn is_empty(&self) -> bool {
        self.words().iter().all(|word| word.get() == 0)
    }

    pub(super) fn clear(&mut self) {
        self.words_mut().fill(le::U32::ZERO);
    }

    /// The words of the map.
    pub(super) fn words(&self) -> &[le::U32] {
        match self {
            Self::One(word) => word,
            Self::Several(words) => words,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::DirtyChunks;

    /// A block of 1 KiB has 8 chunks, so it may begin in the middle of a word.
    #[test]
    fn a_part_has_the_chunks_of_its_bytes() {
        let mut all = DirtyChunks::new(4096);
        all.add(1000..1030);
        all.add(3000..3001);
        let part =
            |bytes| all.part(bytes).words().iter().map(|word| word.get()).collect::<Vec<_>>();
        assert_eq!(part(0..1024), [1 << 7]);
        assert_eq!(part(1024..2048), [1]);
        assert_eq!(part(2048..4096), [1 << 7]);
        assert!(all.part(3072..4096).is_empty());
        assert_eq!(all.part(0..4096), all);
    }

    #[test]
    fn chunks_are_those_of_the_bytes() {
        for len in [4096, 16384] {
            for start in (0..len).step_by(61) {
                for end in [start, start + 1, start + 128, start + 5000, len, len + 200] {
                    let mut map = DirtyChunks::new(len);
                    map.add(start..end);
                    for chunk in 0..len / 128 {
                        let is_in = map.words()[chunk / 32].get() >> (chunk % 32) & 1 != 0;
                        let touches = chunk >= start / 128 && chunk < end.div_ceil(128);
                        assert_eq!(is_in, touches, "{start}..{end}, chunk {chunk}");
                    }
                }
            }
        }
    }
}
