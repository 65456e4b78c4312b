//! Ping-pong: the kernel and we change one volume by turns.
//!
//! ```text
//! we open it, actors change it, sync, close ──> btrfs check ──> we read it ─┐
//!       ^                                                                   │ both as the model says
//!       │                                                                   v
//! btrfs check <── unmount <── the model becomes what the kernel shows <── the kernel mounts it, changes it
//! ```
//!
//! Both sides change the same files, because the kernel uses the names of the actors. What the
//! kernel compressed, preallocated, cloned, snapshotted or wrote without checksums, we overwrite
//! and truncate, and the other way round.
//!
//! | module | what it holds |
//! |---|---|
//! | `rows` | the matrix of volumes |
//! | `volume` | how a row becomes a volume, by our `mkfs` or by `mkfs.btrfs` |
//! | `rounds` | the rounds, and what has to hold between them |
//! | `kept` | files of every kind that the kernel makes, changed by us and by the kernel by turns |
//! | `filled` | volumes that `mkfs.btrfs` fills from a directory |
//!
//! Every run plays a sample of the rows for two rounds. `cargo xtask campaign pingpong` plays every
//! row with both makers. `OFFSHOOT_SEED` repeats a run.

mod filled;
mod kept;
mod rounds;
mod rows;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod volume;
