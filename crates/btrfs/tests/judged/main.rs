//! Judges the engine on volumes that `mkfs.btrfs` and the kernel made.
//!
//! | module | what is judged |
//! |---|---|
//! | `matrix` | volumes of every layout show exactly what the kernel's mount shows |
//! | `members` | missing, stale, foreign and seed devices |
//! | `subvolumes` | lists, default, selection |
//! | `states` | pending logs, unknown features, volumes after a crash |
//! | `backups` | the backup roots in our superblocks |
//! | `damage` | bad copies are survived and reported; bad only copies are errors |
//! | `threads` | many threads on one volume |
//!
//! All modules are one program, so that their tests share the machine's loop devices and cores in
//! one queue.

mod backups;
mod common;
mod damage;
mod matrix;
mod members;
mod states;
mod subvolumes;
mod threads;
