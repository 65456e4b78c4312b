//! Judges how the engine makes, snapshots and deletes subvolumes.
//!
//! | module | what is judged |
//! |---|---|
//! | `same` | our calls make what the same calls of the kernel make |
//! | `dropping` | deleted subvolumes are dropped with all that they hold, even if one side starts and the other goes on |
//! | `open` | open files of deleted subvolumes can be used until they are closed |
//! | `turns` | the kernel and we snapshot, change and delete what the other side made |
//! | `many` | many snapshots of one tree, deleted again; `cargo xtask campaign snapshots` for ten thousand |
//! | `orphans` | opening a volume removes the unlinked files that a crash left, from all subvolumes |
//! | `moments` | a snapshot among many writers shows one moment |
//! | `races` | subvolumes that are made and deleted while other threads use them |
//! | `received` | the UUIDs by which the kernel finds received subvolumes are kept |
//! | `refusals` | impossible calls fail as they do in the kernel, and change nothing |

mod common;
mod dropping;
mod many;
mod moments;
mod open;
mod orphans;
mod races;
mod received;
mod refusals;
mod same;
mod turns;
