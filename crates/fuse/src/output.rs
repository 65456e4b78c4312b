//! An answer under construction, in a buffer that the transport sends.

use offshoot_vfs::{Errno, Error, Result};
use zerocopy::{Immutable, IntoBytes};

/// An answer without its header.
pub(crate) struct AnswerBody<'a> {
    buffer: &'a mut [u8],
    len: usize,
}

impl<'a> AnswerBody<'a> {
    /// An empty answer that can grow to the length of `buffer`.
    pub(crate) fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, len: 0 }
    }

    /// How many more bytes fit.
    pub(crate) fn room(&self) -> usize {
        self.buffer.len() - self.len
    }

    /// Adds a structure.
    pub(crate) fn put<T: IntoBytes + Immutable>(&mut self, value: &T) -> Result<()> {
        self.put_bytes(value.as_bytes())
    }

    /// Adds bytes.
    pub(crate) fn put_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.space(bytes.len())?.copy_from_slice(bytes);
        self.len += bytes.len();
        Ok(())
    }

    /// Gives `fill` space for `len` bytes, and adds as many as it returns.
    pub(crate) fn fill(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<usize>,
    ) -> Result<()> {
        let space = self.space(len)?;
        self.len += fill(space)?.min(len);
        Ok(())
    }

    fn space(&mut self, len: usize) -> Result<&mut [u8]> {
        let too_large = || Error::posix(Errno::RANGE, "an answer that is longer than any can be");
        self.buffer[self.len..].get_mut(..len).ok_or_else(too_large)
    }

    /// The answer.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.buffer[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_than_there_is_room_for() {
        let mut buffer = [0; 10];
        let mut output = AnswerBody::new(&mut buffer);
        output.put(&7_u32).expect("room");
        output.fill(6, |space| Ok(space.len() / 2)).expect("room");
        assert_eq!(output.room(), 3);
        assert!(output.put_bytes(b"four").is_err());
        assert!(output.fill(4, |_| Ok(0)).is_err());
        let expected = [&7_u32.to_ne_bytes()[..], &[0; 3]].concat();
        assert_eq!(output.bytes(), expected, "what does not fit leaves it as it is");
    }
}
