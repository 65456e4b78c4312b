//! Devices that fail while a workload is done: an error, a short write or silent corruption, at
//! every request.
//!
//! The requests of a workload are counted once; then it is done again for each of them, with a
//! fault there.
//!
//! | fault | what must hold |
//! |---|---|
//! | a write or flush that fails, or writes its beginning only | the step reports it, and after a failed `fsync` or `sync` everything is refused with `EROFS`; or the engine says that it survived it, and nothing is lost. Where each member can be done without, all of these are survived |
//! | a read that fails | another copy does, or the step reports it |
//! | a read or a write of which every byte is inverted | found by checksums: another copy does, or it is reported, of one file or of those that share the data; what is read is never wrong |
//! | any of these but an error, in a workload that writes data in place | not inflicted: such data has no checksums |
//! | any | the volume holds what was promised, is in order, and can be changed when it is opened again |

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice, Requests};
use offshoot_vfs::{Errno, Error, FileSystemMut, NewFile, Place, Timestamp};

use super::explore::enter;
use super::oracle::History;
use super::record::{Ready, as_devices};
use super::{Engine, Workload};

/// What is done at each request of its kind.
const KINDS: [(Requests, Fault); 6] = [
    (Requests::Writes, Fault::Error),
    (Requests::Writes, Fault::Short),
    (Requests::Writes, Fault::Garbage),
    (Requests::Flushes, Fault::Error),
    (Requests::Reads, Fault::Error),
    (Requests::Reads, Fault::Garbage),
];

/// Whether a fault can be found and mended. Data that is written in place has no checksum and no
/// copy of before: of it only errors can be told.
fn can_bear(workload: &Workload, fault: Fault) -> bool {
    fault == Fault::Error || !workload.writes_in_place()
}

/// How faults are inflicted.
pub struct Inflicter<'a> {
    /// Who has to bear them.
    pub engine: &'a dyn Engine,
    /// An empty volume.
    pub image: Vec<Arc<dyn BlockDevice>>,
    /// Whether there are several copies of data, as there must be of all else.
    pub has_copies: bool,
    /// Whether the volume can do without any one of its members.
    pub spares_members: bool,
}

/// What was inflicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Inflicted {
    /// Faults.
    pub faults: usize,
    /// Those that a step, or opening the volume, reported.
    pub reported: usize,
    /// Those that were survived, as the engine said.
    pub survived: usize,
    /// Those after which data was corrupt, and reading it said so.
    pub corrupt: usize,
}

impl AddAssign for Inflicted {
    fn add_assign(&mut self, other: Self) {
        self.faults += other.faults;
        self.reported += other.reported;
        self.survived += other.survived;
        self.corrupt += other.corrupt;
    }
}

impl std::fmt::Display for Inflicted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { faults, reported, survived, corrupt } = self;
        write!(
            f,
            "{faults} faults, {reported} reported, {survived} survived, {corrupt} left corrupt data"
        )
    }
}

/// A workload that was done with a fault.
struct Attempt {
    memory: Vec<Arc<MemoryDevice>>,
    devices: Vec<Arc<FaultDevice>>,
    kept: Vec<usize>,
    begun: usize,
    /// How many failures were survived.
    survived: usize,
    /// The steps that were refused, and may be.
    outcome: Result<Vec<usize>, Error>,
}

impl Inflicter<'_> {
    /// Does the workload with each fault at each request to each member.
    ///
    /// # Errors
    /// The first fault after which something does not hold.
    pub fn inflict(&self, workload: &Workload) -> Result<Inflicted, String> {
        let ready = Ready::new(self.engine, &self.image, workload)?;
        let sound = self.attempt(&ready, workload, None)?;
        let refused = sound.outcome.map_err(|e| format!("without a fault: {e}"))?;
        let history = Ready::new(self.engine, &self.image, workload)?
            .history(workload, &refused)
            .map_err(|e| format!("without a fault: {e}"))?;
        let mut inflicted = Inflicted::default();
        let most = if self.has_copies { 0 } else { workload.most_sharers() };
        for member in 0..self.image.len() {
            for (requests, fault) in
                KINDS.into_iter().filter(|&(_, fault)| can_bear(workload, fault))
            {
                for number in 0..sound.devices[member].count(requests) {
                    let strike = (member, requests, number, fault);
                    let attempt = self.attempt(&ready, workload, Some(strike));
                    let one = attempt.and_then(|one| self.judge(one, &history, strike, most));
                    inflicted += one.map_err(|e| {
                        format!(
                            "{fault:?} at number {number} of {requests:?} to member {member}: {e}"
                        )
                    })?;
                }
            }
        }
        Ok(inflicted)
    }

    /// Does the workload once.
    ///
    /// # Errors
    /// When the volume takes changes after a commit that failed.
    fn attempt(
        &self,
        ready: &Ready,
        workload: &Workload,
        strike: Option<(usize, Requests, u64, Fault)>,
    ) -> Result<Attempt, String> {
        let memory = ready.copies();
        let devices: Vec<_> =
            as_devices(&memory).into_iter().map(|one| Arc::new(FaultDevice::new(one))).collect();
        if let Some((member, requests, number, fault)) = strike {
            devices[member].strike(requests, number, fault);
        }
        let (mut kept, mut begun, mut survived) = (Vec::new(), 0, 0);
        let shared = devices.iter().map(|device| device.clone() as Arc<_>).collect();
        let outcome = match self.engine.open_writable(shared) {
            Err(error) => Err(error),
            Ok(fs) => {
                let done = ready.run(&fs, workload, &mut |moment| begun = moment, &mut |promise| {
                    kept.push(promise);
                });
                if let Err((place, _)) = &done
                    && !workload.steps[*place].is_change()
                {
                    require_refusal(&*fs)?;
                }
                survived = fs.survived.load(Ordering::Relaxed);
                done.map_err(|(_, error)| error)
            }
        };
        Ok(Attempt { memory, devices, kept, begun, survived, outcome })
    }

    fn judge(
        &self,
        attempt: Attempt,
        history: &History,
        (member, requests, number, fault): (usize, Requests, u64, Fault),
        most_corrupt: usize,
    ) -> Result<Inflicted, String> {
        let struck = attempt.devices[member].count(requests) > number;
        let must_be_told = requests != Requests::Reads && fault != Fault::Garbage;
        match &attempt.outcome {
            Ok(_) if struck && must_be_told && attempt.survived == 0 => {
                return Err("nobody was told".into());
            }
            Err(error) if must_be_told && self.spares_members => {
                return Err(format!("it is not survived: {error}"));
            }
            Ok(_) | Err(Error::Io { .. }) => {}
            Err(Error::Corrupt(_)) if fault == Fault::Garbage => {}
            Err(error) => return Err(format!("it is reported as {error}")),
        }
        let found = enter(self.engine, &attempt.memory)?;
        let corrupt = found.corrupt();
        let may_be_corrupt = requests == Requests::Writes && fault == Fault::Garbage;
        if corrupt > if may_be_corrupt { most_corrupt } else { 0 } {
            return Err(format!("{corrupt} files are corrupt"));
        }
        let problems = history.judge(&found, &attempt.kept, attempt.begun);
        if !problems.is_empty() {
            let (kept, begun) = (attempt.kept, attempt.begun);
            let problems = problems.join("\n  ");
            return Err(format!("promises {kept:?}, moment {begun} at the latest:\n  {problems}"));
        }
        let reported = usize::from(attempt.outcome.is_err());
        let survived = usize::from(attempt.survived > 0);
        Ok(Inflicted { faults: usize::from(struck), reported, survived, corrupt })
    }
}

/// A volume whose commit failed takes no changes and promises nothing any more.
fn require_refusal(fs: &dyn FileSystemMut) -> Result<(), String> {
    let new = NewFile { permissions: 0o600, uid: 0, gid: 0, umask: None, at: Timestamp::default() };
    let made = fs.create(Place { dir: fs.root(), name: b"refused" }, &new).map(drop);
    for (what, outcome) in [("a new file", made), ("a sync", fs.sync())] {
        if !matches!(outcome, Err(Error::Posix { errno: Errno::ROFS, .. })) {
            return Err(format!("after a commit that failed, {what} gives {outcome:?}"));
        }
    }
    Ok(())
}
