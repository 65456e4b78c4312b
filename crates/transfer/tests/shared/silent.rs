//! A watcher that shows nothing.

use std::fmt::Display;

use offshoot_transfer::{Hint, TransferProgress, Watcher};

/// A watcher, and its progress.
#[derive(Clone, Copy)]
pub(crate) struct SilentWatcher {
    /// Whether an error fails the test.
    pub(crate) fails_on_errors: bool,
}

impl Watcher for SilentWatcher {
    fn words(&self, _: Hint) -> &'static str {
        "what the program says"
    }

    fn error(&self, text: &dyn Display) {
        assert!(!self.fails_on_errors, "{text}");
    }

    fn detail(&self, _: &dyn Display) {}

    fn warning(&self, _: &dyn Display) {}

    fn note(&self, _: &dyn Display) {}

    fn is_interrupted(&self) -> bool {
        false
    }

    fn start_progress(&self, _: &'static str) -> Box<dyn TransferProgress> {
        Box::new(*self)
    }

    fn stop_progress(&self) {}
}

impl TransferProgress for SilentWatcher {
    fn is_hidden(&self) -> bool {
        true
    }

    fn expect(&self, _: u64) {}

    fn add_bytes(&self, _: u64) {}

    fn add_file(&self) {}
}
