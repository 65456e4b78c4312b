//! Files between a filesystem behind the `vfs` traits and the world.
//!
//! | module | what it does |
//! |---|---|
//! | [`extract`] | out: a tree into a directory of the host, or as a tar stream |
//! | [`copy`] | in: from the host, from another filesystem, from elsewhere in the same one |
//! | [`stream`] | the contents of one file where there are no holes |
//! | [`xattrs`] | the extended attributes of one file, where they are needed all at once |
//! | [`host`] | which file of the host is which, and what a transfer needs of its process |
//!
//! It knows no format, and no terminal: what goes wrong with single files, and how far the work is,
//! it tells a [`Watcher`]; why it did not begin or could not go on is a [`Failure`].

pub mod copy;
pub mod extract;
mod failure;
pub mod host;
pub mod stream;
mod watch;
pub mod xattrs;

pub use failure::{Failure, Result, Worst};
pub use watch::{Hint, Progress, Watcher};
