//! Standard error: the one place where errors, warnings and progress are written.
//!
//! A line is `offshoot: MESSAGE`, and a warning `offshoot: warning: MESSAGE`. Messages may
//! quote names of a hostile volume, so all of them are made harmless here. Warnings of the
//! library are bounded in number: a volume with a million bad copies says so in a few
//! lines and a count. The progress line exists on a terminal only.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::{Progress, message};

/// How many warnings are printed before they are only counted.
const WARNINGS_PRINTED: u64 = 20;

/// Standard error, shared by all threads.
#[derive(Default)]
pub(crate) struct Console {
    /// Where lines go instead: to who asked for what this process does.
    other: Option<Mutex<Box<dyn Write + Send>>>,
    warnings: AtomicU64,
    progress: Mutex<Option<Progress>>,
}

impl Console {
    /// One whose lines go to `other`.
    pub(crate) fn to(other: Box<dyn Write + Send>) -> Self {
        Self { other: Some(Mutex::new(other)), ..Self::default() }
    }

    /// Prints what was made harmless: a line, or what the console of another process has for this one.
    pub(crate) fn relay(&self, bytes: &[u8]) {
        // When it cannot be written there is nobody left to tell.
        let _ = match &self.other {
            Some(other) => other.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes),
            None => std::io::stderr().lock().write_all(bytes),
        };
    }

    /// Prints an error.
    pub(crate) fn error(&self, text: &dyn fmt::Display) {
        self.line(&format!("offshoot: {text}"));
    }

    /// Prints what is no error and was asked for.
    pub(crate) fn note(&self, text: &dyn fmt::Display) {
        self.line(&format!("offshoot: {text}"));
    }

    /// Prints a line that belongs to the message before it.
    pub(crate) fn detail(&self, text: &dyn fmt::Display) {
        self.line(&format!("  {text}"));
    }

    /// Prints a warning, or counts it when there were many.
    pub(crate) fn warning(&self, text: &dyn fmt::Display) {
        if self.warnings.fetch_add(1, Ordering::Relaxed) < WARNINGS_PRINTED {
            self.line(&format!("offshoot: warning: {text}"));
        }
    }

    /// Says how many warnings were only counted.
    pub(crate) fn finish(&self) {
        let hidden = self.warnings.load(Ordering::Relaxed).saturating_sub(WARNINGS_PRINTED);
        if hidden > 0 {
            self.line(&format!("offshoot: warning: and {hidden} more warnings like these"));
        }
    }

    /// Starts a progress line, if anybody watches.
    pub(crate) fn start_progress(&self, verb: &'static str) -> Progress {
        if self.other.is_some() || !std::io::stderr().is_terminal() {
            return Progress::hidden();
        }
        let progress = Progress::shown(verb);
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(progress.clone());
        progress
    }

    /// Takes the progress line away.
    pub(crate) fn stop_progress(&self) {
        let taken = self.progress.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(progress) = taken {
            progress.clear();
        }
    }

    fn line(&self, text: &str) {
        let print = || self.relay(format!("{}\n", message(text)).as_bytes());
        match &*self.progress.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(progress) => progress.suspend(print),
            None => print(),
        }
    }
}
