//! Prints what was copied (`-v`) to standard output, from several threads.

use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};

use offshoot_transfer::copy;

use crate::exit::{Result, VerbFailure};
use crate::output::write_name;

/// Standard output, for the threads of the copy.
pub(super) struct CopyOutput(Mutex<Output>);

struct Output {
    out: BufWriter<File>,
    failed: Option<io::Error>,
}

impl CopyOutput {
    pub(super) fn start() -> Result<Self> {
        // Use a descriptor of its own, because this thread has locked standard output for itself.
        let out =
            rustix::io::dup(io::stdout()).map_err(|errno| VerbFailure::Output(errno.into()))?;
        Ok(Self(Mutex::new(Output { out: BufWriter::new(out.into()), failed: None })))
    }

    fn say(&self, line: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Output { out, failed } = &mut *told;
        if failed.is_some() {
            return;
        }
        // On a terminal, show each file as soon as it is copied.
        let flush = |out: &mut BufWriter<File>| {
            if out.get_ref().is_terminal() { out.flush() } else { Ok(()) }
        };
        *failed = line(out).and_then(|()| flush(out)).err();
    }

    /// Writes what is buffered, and gives the first error of all lines.
    pub(super) fn finish(&self) -> Result {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let flushed = told.out.flush();
        Ok(told.failed.take().map_or(flushed, Err)?)
    }
}

impl copy::CopyReporter for CopyOutput {
    fn copied(&self, from: &[u8], to: &[u8]) {
        self.say(|out| {
            out.write_all(b"'")?;
            write_name(out, from)?;
            out.write_all(b"' -> '")?;
            write_name(out, to)?;
            out.write_all(b"'\n")
        });
    }

    fn removed(&self, to: &[u8]) {
        self.say(|out| {
            out.write_all(b"removed '")?;
            write_name(out, to)?;
            out.write_all(b"'\n")
        });
    }
}
