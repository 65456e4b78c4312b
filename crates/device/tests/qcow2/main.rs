//! qcow2: images of QEMU are read and written as QEMU does it, and a power cut at any point leaves
//! an image without corruption.

#[path = "../bodies/mod.rs"]
mod bodies;
mod cuts;
mod damaged;
mod failing;
mod generated;
mod parts;
#[path = "../qemu/mod.rs"]
mod qemu;
