//! qcow2: what QEMU made is read and written as QEMU has it, and a power cut at any point leaves an
//! image without corruption.

#[path = "../bodies/mod.rs"]
mod bodies;
mod cuts;
mod damaged;
mod failing;
mod generated;
mod parts;
#[path = "../qemu/mod.rs"]
mod qemu;
