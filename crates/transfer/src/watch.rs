//! What a transfer reports while it runs.

use std::fmt::Display;

/// What only the program can say, because it is about how a user calls the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Why a directory is not copied: the caller asked only for files.
    NotRecursive,
    /// Why a file is not copied to a place: another source of the same command went there.
    JustMade,
    /// How to continue an extraction that stopped half done: the caller starts it again.
    Resumable,
}

/// The program's side of a transfer. The transfer reports to it, and it can end the transfer. All
/// threads of the transfer call it. Texts can quote names, which are escaped.
pub trait Watcher: Sync {
    /// The words of the program for `hint`: part of a sentence, without a full stop.
    fn words(&self, hint: Hint) -> &'static str;

    /// An error of one file or of the whole transfer.
    fn error(&self, text: &dyn Display);

    /// A line that belongs to the message before it.
    fn detail(&self, text: &dyn Display);

    /// Something unexpected that is no error.
    fn warning(&self, text: &dyn Display);

    /// Information.
    fn note(&self, text: &dyn Display);

    /// Whether the transfer should end early and in order, as after a signal.
    fn is_interrupted(&self) -> bool;

    /// The transfer begins. `verb` names what it does, as in "extracted 5 files".
    fn start_progress(&self, verb: &'static str) -> Box<dyn TransferProgress>;

    /// The transfer reports no more to the progress that it started.
    fn stop_progress(&self);
}

/// How far a transfer is.
pub trait TransferProgress: Sync {
    /// Whether the program shows no progress. Then the transfer does not count its bytes
    /// beforehand.
    fn is_hidden(&self) -> bool;

    /// The transfer will be `bytes` long.
    fn expect(&self, bytes: u64);

    /// More bytes are done.
    fn add_bytes(&self, bytes: u64);

    /// One more file is done.
    fn add_file(&self);
}
