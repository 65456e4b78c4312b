//! Subvolumes and snapshots as the engine makes and deletes them, before its judges.
//!
//! | module | what is judged |
//! |---|---|
//! | `same` | what ours makes is what the kernel makes of the same calls |
//! | `dropping` | deleted subvolumes go with all that is theirs, whoever goes on after whom |
//! | `open` | files of deleted subvolumes that are open can be used until they are closed |
//! | `turns` | the kernel and ours snapshot, change and delete what the other one made |
//! | `many` | many snapshots of one tree, deleted again; `cargo xtask campaign snapshots` for ten thousand |
//! | `orphans` | what a crash left of unlinked files goes from all subvolumes when the volume is opened |
//! | `moments` | a snapshot among many writers shows one moment |
//! | `races` | subvolumes that come and go while others work on them |
//! | `received` | what the kernel finds received subvolumes by is kept |
//! | `refusals` | what cannot be done fails as it does in the kernel, and changes nothing |

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
