//! The crash explorer: it builds every state that a power cut or a failing device can leave, and
//! judges each state by what the engine promised.
//!
//! The explorer runs a [`Workload`] on an engine, over devices that record every write, and on the
//! model. Then it takes each state that a cut could have left. It opens and checks the volume,
//! compares it with what the model allows (the rules are in `oracle`), changes it, syncs it, and
//! opens it again.
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
//!   names in it. What else it makes durable is the engine's choice: nothing, the directories that
//!   lead to the file, or all names and attributes.
//! - If an engine's names and attributes are ordered ([`EngineManners`]), an `fsync` also makes
//!   durable those that changed before the last change of its file.
//! - The engine may commit at any time by itself (the dirty set is full, time passed, space is
//!   short). Then the first operations, up to some moment, are durable. Of the data in memory, the
//!   data that was written back is durable, and the size of the file reaches as far as that data.
//!
//! States with equal contents are opened once, and judged once for each state, by its own promises.
//! [`faults`] does the same with devices that fail instead of a cut. [`Promised`] judges by the
//! same rules what others, such as the kernel, made of a workload.

pub mod calls;
pub mod explore;
pub mod faults;
pub mod generate;
pub mod manners;
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

use offshoot_device::BlockDevice;
use offshoot_vfs::{FileSystemMut, Result};

pub use promised::Promised;
pub use workload::{Workload, WorkloadOp, WorkloadStep};

use crate::model::subvolumes::SubvolumeCalls;
use manners::{EngineManners, NoSubvolumes};
use picture::Picture;
use workload::Runner;

/// The members of a volume.
pub type MemberDevices = Vec<Arc<dyn BlockDevice>>;

/// An open volume.
pub struct OpenedVolume {
    /// The files of the volume.
    pub files: Box<dyn FileSystemMut>,
    /// The calls that change its subvolumes.
    pub subvolumes: Box<dyn SubvolumeCalls>,
    /// How many failed writes and flushes the engine has reported that fail no call.
    pub survived: Arc<AtomicUsize>,
}

impl OpenedVolume {
    /// A volume of a format without subvolumes.
    #[must_use]
    pub fn without_subvolumes(files: Box<dyn FileSystemMut>) -> Self {
        let subvolumes = Box::new(NoSubvolumes { root: files.root() });
        Self { files, subvolumes, survived: Arc::default() }
    }

    /// A runner for the operations of a workload; `first` is the number of its first operation.
    #[must_use]
    pub fn runner(&self, first: u32) -> Runner<'_> {
        Runner::new(&**self, first).with_subvolumes(&*self.subvolumes)
    }

    fn picture(&self, manners: EngineManners) -> Result<Picture> {
        picture::take(&**self, &*self.subvolumes, manners)
    }
}

impl Deref for OpenedVolume {
    type Target = dyn FileSystemMut;

    fn deref(&self) -> &Self::Target {
        &*self.files
    }
}

/// The engine under test: it opens volumes. Dropping one may write, as an unmount does.
pub trait TestedEngine: Sync {
    /// Opens the volume for reading.
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume>;

    /// Opens the volume for writing, as after a crash.
    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume>;

    /// Reads everything that describes the volume, and returns an error if anything is wrong.
    fn check(&self, devices: MemberDevices) -> Result<()>;

    /// What it does in its own way.
    fn manners(&self) -> EngineManners {
        EngineManners::default()
    }

    /// Whether the engine bears that this write is torn: its first byte on the device, and its
    /// bytes.
    fn bears_torn(&self, _offset: u64, _data: &[u8]) -> bool {
        true
    }
}

/// Prints what was explored to standard error, so that a test that passes shows it too: the test
/// runner shows the output of `println!` only for tests that fail.
pub fn report(what: impl Display) {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("a test");
    // If standard error is closed, there is no reader to inform.
    let _ = writeln!(std::io::stderr(), "{name}: {what}");
}
