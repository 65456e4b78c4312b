//! The lines of a manifest.

use std::io::{BufRead, BufReader, Read};

use super::super::entry::SourceProblem;
use super::super::unpack::ArchiveInput;

/// The most that one line may take, with those that go on in the next one. The extended attributes
/// of one file that an archive may have are within it.
const LINE_BYTES_MAX: usize = 24 << 20;

/// The most words of a line. Each extended attribute is one.
pub(super) const WORDS_MAX: usize = 1 << 16;

/// How much is read at once.
const BUFFER_BYTES: usize = 256 << 10;

/// A manifest that is read line by line.
pub(super) struct ManifestLines<'a> {
    input: BufReader<Box<dyn ArchiveInput + 'a>>,
    /// Lines that were read.
    count: u64,
    /// The number of the line that the last one began with.
    number: u64,
}

impl<'a> ManifestLines<'a> {
    pub(super) fn new(input: Box<dyn ArchiveInput + 'a>) -> Self {
        Self { input: BufReader::with_capacity(BUFFER_BYTES, input), count: 0, number: 0 }
    }

    /// The number of the line that was read last, from 1.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Reads the next line into `line`, without its end. Whether there was one.
    pub(super) fn next_line(&mut self, line: &mut Vec<u8>) -> Result<bool, SourceProblem> {
        line.clear();
        self.number = self.count + 1;
        self.read_on(line)
    }

    /// Reads one more line, which the one in `line` goes on in. Whether there was one.
    pub(super) fn read_on(&mut self, line: &mut Vec<u8>) -> Result<bool, SourceProblem> {
        let left = LINE_BYTES_MAX.saturating_sub(line.len()) as u64;
        let read = self.input.by_ref().take(left + 1).read_until(b'\n', line)?;
        if read as u64 > left {
            let what = format!("a line of more than {} MiB", LINE_BYTES_MAX >> 20);
            return Err(SourceProblem::Refused(what));
        }
        self.count += u64::from(read > 0);
        if line.last() == Some(&b'\n') {
            line.pop();
        }
        Ok(read > 0)
    }
}
