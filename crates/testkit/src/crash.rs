//! The crash explorer: what a power cut or a failing device leaves of a volume, judged by what was
//! promised.
//!
//! A [`Workload`] is done to an engine over devices that remember every write, and to the model.
//! Then every state that a cut could have left is opened, checked, compared with what the model
//! says that it may be (the rules are in `oracle`), changed, synced, and opened again.
//!
//! ```text
//!   generate ──> Workload ──> record ──> CrashLog ──> states ──> enter ──> Picture ──┐
//!                               │                                                    ├──> oracle
//!                               └──> model ──> a Picture of every moment, promises ──┘
//! ```
//!
//! What an engine promises, and is held to:
//!
//! - `sync` makes durable everything that was done before it.
//! - `fsync` makes durable the data, the attributes and the names of a file, or a directory and the
//!   names in it. What else it makes durable is the engine's affair: nothing, what the file needs
//!   to be found, or all names and attributes.
//! - At any time the engine may commit by itself (the dirty set is full, time passed, space is
//!   short): a beginning of the operations is durable then. Of data in memory what was written back
//!   is there, and the size is that of it.
//!
//! States that hold the same are entered once and judged each time, by the promises of each.
//! [`faults`] is the same with devices that fail instead of a cut, and [`Promised`] judges what
//! others made of a workload, such as the kernel, by the same rules.

pub mod explore;
pub mod faults;
pub mod generate;
mod oracle;
mod picture;
mod promised;
mod record;
mod script;
pub mod workload;

use std::fmt::Display;
use std::io::Write;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::UNIX_EPOCH;

use offshoot_device::BlockDevice;
use offshoot_vfs::{FileSystemMut, Result};

pub use promised::Promised;
pub use workload::{Op, Step, Workload};

use crate::model::subvolumes::Subvolumes;
use picture::Picture;
use workload::Runner;

/// The members of a volume.
pub type Devices = Vec<Arc<dyn BlockDevice>>;

/// An open volume.
pub struct Opened {
    /// Its files.
    pub files: Box<dyn FileSystemMut>,
    /// What is done to its subvolumes.
    pub subvolumes: Box<dyn Subvolumes>,
    /// How many failures of writes and flushes the engine has reported as survived.
    pub survived: Arc<AtomicUsize>,
}

impl Opened {
    /// Who does the operations of a workload to it, of which the first has this number.
    #[must_use]
    pub fn runner(&self, first: u32) -> Runner<'_> {
        Runner::new(&**self, first).with_subvolumes(&*self.subvolumes)
    }

    fn picture(&self) -> Result<Picture> {
        picture::take(&**self, &*self.subvolumes)
    }
}

impl Deref for Opened {
    type Target = dyn FileSystemMut;

    fn deref(&self) -> &Self::Target {
        &*self.files
    }
}

/// What is tested: something that opens volumes.
pub trait Engine: Sync {
    /// Opens the volume for reading.
    fn open(&self, devices: Devices) -> Result<Opened>;

    /// Opens the volume for writing, as after a crash.
    fn open_writable(&self, devices: Devices) -> Result<Opened>;

    /// Reads everything that describes the volume, which is in order or an error.
    fn check(&self, devices: Devices) -> Result<()>;
}

/// Says what was explored, so that it is seen of a test that passes as well: the test runner keeps
/// what `println!` prints for those that fail.
pub fn report(what: impl Display) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // Who has closed standard error does not want to know.
    let _ = writeln!(std::io::stderr(), "{name}: {what}");
}

/// The seed of this test: that in the variable `OFFSHOOT_SEED`, or else a new one. It is printed.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("OFFSHOOT_SEED").ok();
    let seed = given.map_or_else(
        || UNIX_EPOCH.elapsed().map_or(0, |since| u64::from(since.subsec_nanos())),
        |seed| seed.parse().expect("OFFSHOOT_SEED is a number"),
    );
    let thread = std::thread::current();
    println!("{}: OFFSHOOT_SEED={seed}", thread.name().unwrap_or("a test"));
    seed
}
