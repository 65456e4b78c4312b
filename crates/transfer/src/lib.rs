//! Files between a filesystem behind the `vfs` traits and the world.
//!
//! | module | what it does |
//! |---|---|
//! | [`extract`] | out: a tree into a directory of the host, or as a tar stream |
//! | [`build`] | in: from directories, archives and container images into a new volume |
//! | [`copy`] | in: from the host, from another filesystem, from elsewhere in the same one |
//! | [`stream`] | the contents of one file where there are no holes |
//! | [`xattrs`] | the extended attributes of one file, where they are needed all at once |
//! | [`host`] | which file of the host is which, and what a transfer needs of its process |
//!
//! It knows no format, no terminal and no command line. A program that calls it prepares its
//! [`Process`](host::Process) first.
//!
//! These types say what went wrong. A [`TransferFailure`] is why a transfer did not begin or could
//! not continue. [`Problems`](extract::Problems) collects what went wrong with single files,
//! reports it to the [`Watcher`] of the program, and counts it; [`Worst`] is the worst of that,
//! from which the program makes its exit status. `CopyTrouble` and `ExtractTrouble` are the problem
//! of one file on its way to `Problems`; callers never see them.

pub mod build;
pub mod copy;
pub mod extract;
mod failure;
pub mod host;
pub mod stream;
mod watch;
pub mod xattrs;
mod zeros;

pub use failure::{Result, TransferFailure, Worst};
pub use watch::{Hint, TransferProgress, Watcher};
