//! What a transfer tells while it runs.

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

    /// One file, or all of the transfer, is not as it should be.
    fn error(&self, text: &dyn Display);

    /// A line that belongs to the message before it.
    fn detail(&self, text: &dyn Display);

    /// Something that is no error and was not asked for.
    fn warning(&self, text: &dyn Display);

    /// What is no error and was asked for.
    fn note(&self, text: &dyn Display);

    /// Whether everything is to end in order, as after a signal.
    fn is_interrupted(&self) -> bool;

    /// It begins; `verb` says what is done, as in "extracted 5 files".
    fn start_progress(&self, verb: &'static str) -> Box<dyn Progress>;

    /// No more comes for the progress that was started.
    fn stop_progress(&self);
}

/// How far a transfer is.
pub trait Progress: Sync {
    /// Whether nobody wants to know, so that nothing needs to be counted beforehand.
    fn is_hidden(&self) -> bool;

    /// It will be so many bytes.
    fn expect(&self, bytes: u64);

    /// More bytes are done.
    fn add_bytes(&self, bytes: u64);

    /// One more file is done.
    fn add_file(&self);
}
