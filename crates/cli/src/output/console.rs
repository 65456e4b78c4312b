//! Standard error: the only place where errors, warnings and progress are written.
//!
//! An error is a line `offshoot: MESSAGE`, and a warning is `offshoot: warning: MESSAGE`. With
//! `--json`, each line is an object instead. Messages may quote names of a hostile volume, so this
//! module escapes all of them. The number of printed warnings is limited: a volume with a million
//! bad mirrors causes a few lines and a count. The progress line appears only on a terminal.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use offshoot_transfer::{self as transfer, Hint, Watcher};
use serde::Serialize;

use super::{ProgressLine, message, write_line};
use crate::exit::ExitStatus;
use crate::interrupt::is_interrupted;

/// How many warnings are printed before they are only counted.
const WARNINGS_PRINTED: u64 = 20;

/// A message as JSON.
#[derive(Serialize)]
struct Said<'a> {
    kind: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<&'static str>,
    message: &'a str,
}

/// The result of a change at a place.
#[derive(Serialize)]
#[expect(clippy::struct_field_names, reason = "it is the name in JSON")]
pub(crate) struct Done {
    /// The volume, as a JSON name.
    pub(crate) volume: String,
    /// The path in it, as a JSON name.
    pub(crate) path: String,
    /// Whether the change was done completely.
    pub(crate) done: bool,
}

/// Standard error, shared by all threads.
#[derive(Default)]
pub(crate) struct Console {
    /// Another stream for the lines: that of the client for which this process works.
    other: Option<Mutex<Box<dyn Write + Send>>>,
    /// Whether lines are JSON.
    is_json: bool,
    warnings: AtomicU64,
    /// The results of changes, for `--json`.
    done: Mutex<Vec<Done>>,
    progress: Mutex<Option<ProgressLine>>,
    /// The steps that were shown.
    steps: Mutex<Vec<&'static str>>,
}

impl Console {
    /// A console whose lines go to `other`.
    pub(crate) fn to(other: Box<dyn Write + Send>) -> Self {
        Self { other: Some(Mutex::new(other)), ..Self::default() }
    }

    /// A console whose lines are JSON if `is_json`.
    pub(crate) fn new(is_json: bool) -> Self {
        Self { is_json, ..Self::default() }
    }

    /// Records the result of a change.
    pub(crate) fn done(&self, done: Done) {
        self.done.lock().unwrap_or_else(PoisonError::into_inner).push(done);
    }

    /// Returns and forgets the recorded results.
    pub(crate) fn take_done(&self) -> Vec<Done> {
        std::mem::take(&mut self.done.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Prints bytes that are escaped already: a line of our own, or output of the console of
    /// another process.
    pub(crate) fn relay(&self, bytes: &[u8]) {
        // If standard error cannot be written, there is no place to report that.
        let _ = match &self.other {
            Some(other) => other.lock().unwrap_or_else(PoisonError::into_inner).write_all(bytes),
            None => std::io::stderr().lock().write_all(bytes),
        };
    }

    /// Prints an error.
    pub(crate) fn error(&self, text: &dyn fmt::Display) {
        self.failure(ExitStatus::Failed, text);
    }

    /// Prints an error with the exit code that it leads to.
    pub(crate) fn failure(&self, status: ExitStatus, text: &dyn fmt::Display) {
        self.say("error", Some(status), "offshoot: ", text);
    }

    /// Prints a message that is not an error and that the user asked for.
    pub(crate) fn note(&self, text: &dyn fmt::Display) {
        self.say("note", None, "offshoot: ", text);
    }

    /// Prints a line that belongs to the message before it.
    pub(crate) fn detail(&self, text: &dyn fmt::Display) {
        self.say("detail", None, "  ", text);
    }

    /// Prints what the user can do next about a failure, once in a run.
    pub(crate) fn step(&self, text: &'static str) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        if !steps.contains(&text) {
            steps.push(text);
            drop(steps);
            self.detail(&text);
        }
    }

    /// Prints a warning, or only counts it after [`WARNINGS_PRINTED`] warnings.
    pub(crate) fn warning(&self, text: &dyn fmt::Display) {
        if self.warnings.fetch_add(1, Ordering::Relaxed) < WARNINGS_PRINTED {
            self.say("warning", None, "offshoot: warning: ", text);
        }
    }

    /// Prints how many warnings were only counted.
    pub(crate) fn finish(&self) {
        let hidden = self.warnings.load(Ordering::Relaxed).saturating_sub(WARNINGS_PRINTED);
        if hidden > 0 {
            let text = format_args!("and {hidden} more warnings like these");
            self.say("warning", None, "offshoot: warning: ", &text);
        }
    }

    /// Starts a progress line if standard error is a terminal of the user.
    pub(crate) fn start_progress(&self, verb: &'static str) -> ProgressLine {
        if self.other.is_some() || !std::io::stderr().is_terminal() {
            return ProgressLine::hidden();
        }
        let progress = ProgressLine::shown(verb);
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(progress.clone());
        progress
    }

    /// Removes the progress line.
    pub(crate) fn stop_progress(&self) {
        let taken = self.progress.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(progress) = taken {
            progress.clear();
        }
    }

    /// Prints a message of a kind, as text or JSON.
    fn say(
        &self,
        kind: &'static str,
        status: Option<ExitStatus>,
        before: &str,
        text: &dyn fmt::Display,
    ) {
        if !self.is_json {
            return self.line(&format!("{before}{text}"));
        }
        let text = text.to_string();
        let said = Said { kind, status: status.map(ExitStatus::name), message: &message(&text) };
        let mut line = Vec::new();
        // Writing to memory does not fail.
        if write_line(&mut line, &said).is_ok() {
            self.print(&line);
        }
    }

    fn line(&self, text: &str) {
        self.print(format!("{}\n", message(text)).as_bytes());
    }

    fn print(&self, line: &[u8]) {
        let print = || self.relay(line);
        match &*self.progress.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(progress) => progress.suspend(print),
            None => print(),
        }
    }
}

/// What this program says for a hint of a transfer.
pub(crate) fn words(hint: Hint) -> &'static str {
    match hint {
        Hint::NotRecursive => "not copied without -r",
        Hint::JustMade => "another source of this command has just gone there",
        Hint::Resumable => "the same command once more goes on there",
    }
}

impl Watcher for Console {
    fn words(&self, hint: Hint) -> &'static str {
        words(hint)
    }

    fn error(&self, text: &dyn fmt::Display) {
        self.error(text);
    }

    fn detail(&self, text: &dyn fmt::Display) {
        self.detail(text);
    }

    fn warning(&self, text: &dyn fmt::Display) {
        self.warning(text);
    }

    fn note(&self, text: &dyn fmt::Display) {
        self.note(text);
    }

    fn is_interrupted(&self) -> bool {
        is_interrupted()
    }

    fn start_progress(&self, verb: &'static str) -> Box<dyn transfer::TransferProgress> {
        Box::new(self.start_progress(verb))
    }

    fn stop_progress(&self) {
        self.stop_progress();
    }
}
