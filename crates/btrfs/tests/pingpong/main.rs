//! Ping-pong: the kernel and we change one volume in turns.
//!
//! ```text
//! we open it, actors change it, sync, close ──> btrfs check ──> we read it ─┐
//!       ^                                                                   │ both as the model says
//!       │                                                                   v
//! btrfs check <── unmount <── the model becomes what the kernel shows <── the kernel mounts it, changes it
//! ```
//!
//! Both change the same files: the kernel uses the names of the actors, so what it compressed,
//! preallocated, cloned, snapshotted or wrote without checksums is overwritten and cut by us, and
//! the other way round.
//!
//! | module | what it holds |
//! |---|---|
//! | `rows` | the matrix of volumes |
//! | `volume` | how a row becomes a volume, by our `mkfs` or by `mkfs.btrfs` |
//! | `rounds` | the rounds, and what has to hold between them |
//! | `kernel` | what the kernel does |
//! | `kept` | chosen files of the kernel, of every kind, changed in part by us and by the kernel in turns |
//! | `filled` | volumes that `mkfs.btrfs` makes with what a directory holds |
//!
//! A sample of the rows is played in every run, for two rounds; `cargo xtask campaign pingpong`
//! plays every row with both makers. `OFFSHOOT_SEED` repeats a run.

mod filled;
mod kept;
mod kernel;
mod rounds;
mod rows;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod volume;
