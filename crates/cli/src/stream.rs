//! Standard output for the contents of a file.

use std::io::{self, IsTerminal, Write};

use crate::exit::VerbFailure;
use crate::output::Escaped;

/// Standard output that refuses binary data on a terminal, because the terminal would interpret it.
pub(crate) struct TextOnly<'a> {
    out: &'a mut dyn Write,
    is_terminal: bool,
}

impl<'a> TextOnly<'a> {
    /// Wraps `out`, which leads to standard output.
    pub(crate) fn new(out: &'a mut dyn Write) -> Self {
        Self { out, is_terminal: io::stdout().is_terminal() }
    }

    /// The failure for an error of standard output while the file at `path` was written.
    pub(crate) fn failure(error: io::Error, path: &[u8]) -> VerbFailure {
        if error.kind() != io::ErrorKind::InvalidData {
            return VerbFailure::Output(error);
        }
        let what = "is no text, and not written to a terminal: write it to a file or into a pipe";
        VerbFailure::Refused(format!("{} {what}", Escaped(path)))
    }
}

impl Write for TextOnly<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Like grep, take a NUL as the sign of binary data.
        if self.is_terminal && bytes.contains(&0) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        self.out.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}
