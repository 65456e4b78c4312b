//! Giving members another size: the engine moves what is in the way, and nothing else changes.
//!
//! | test | judge |
//! |---|---|
//! | volumes of the kernel of every profile, with snapshots, clones and files of all kinds, that shrink, grow, become minimal, and move out of every block group | `btrfs check`, the kernel's mount and writes, the comparison with the volume before |
//! | what cannot be moved | the error, and the generation of the volume |
//! | everything moves while threads write, read, remove and fsync, and snapshots are taken | what each thread wrote, what snapshots showed, `btrfs check`, the kernel's writes |

mod busy;
mod common;
mod refused;
mod shrunk;
