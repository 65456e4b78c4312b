//! Devices that fail while a workload runs: with an error, a short write or silent corruption, at
//! every request.
//!
//! The first run of a workload counts its requests. Then the workload runs again once for each
//! request, with a fault at that request.
//!
//! | fault | what must hold |
//! |---|---|
//! | a write or flush that fails, or writes its beginning only | the step reports it, and after a failed `fsync` or `sync` the engine refuses everything with `EROFS`; or the engine says that it survived the failure, and nothing is lost. If the volume can do without any one member, the engine survives all of these |
//! | a read that fails | the engine reads another mirror, or the step reports the error |
//! | a read or a write of which every byte is inverted | checksums find it: the engine reads another mirror, or reports the file, or the files that share the data; a read never returns wrong data |
//! | any of these except an error, in a workload that writes data in place | not inflicted: such data has no checksums |
//! | any | the volume holds what was promised, passes the check, and can be changed when it is opened again |

use std::ops::AddAssign;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use offshoot_device::{BlockDevice, Fault, FaultDevice, MemoryDevice, RequestKind};
use offshoot_vfs::{EntryPlace, Errno, Error, FileSystemMut, NewFile, Timestamp};

use super::explore::enter;
use super::oracle::History;
use super::record::{ReadyVolume, as_devices};
use super::{TestedEngine, Workload};

/// The faults, each with the kind of requests that it strikes. A run inflicts one of them once.
const KINDS: [(RequestKind, Fault); 6] = [
    (RequestKind::Writes, Fault::Error),
    (RequestKind::Writes, Fault::Short),
    (RequestKind::Writes, Fault::Garbage),
    (RequestKind::Flushes, Fault::Error),
    (RequestKind::Reads, Fault::Error),
    (RequestKind::Reads, Fault::Garbage),
];

/// Whether the engine can detect and mend this fault. What is written in place has no checksum or
/// no older version, so the engine can only notice errors.
fn can_bear(engine: &dyn TestedEngine, workload: &Workload, fault: Fault) -> bool {
    let is_in_place = engine.manners().is_overwriting || workload.writes_in_place();
    fault == Fault::Error || !is_in_place
}

/// How faults are inflicted.
pub struct Inflicter<'a> {
    /// The engine that has to bear them.
    pub engine: &'a dyn TestedEngine,
    /// The members of an empty volume, on which every run starts.
    pub image: Vec<Arc<dyn BlockDevice>>,
    /// Whether data has several mirrors. Metadata must have several in any case.
    pub has_copies: bool,
    /// Whether the volume can do without any one of its members.
    pub spares_members: bool,
}

/// The counts of a test with faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts {
    /// Faults that were inflicted.
    pub faults: usize,
    /// Faults that a step, or opening the volume, reported.
    pub reported: usize,
    /// Faults that the engine reported without failing a call.
    pub survived: usize,
    /// Faults after which data was corrupt, and reading it returned an error.
    pub corrupt: usize,
}

impl AddAssign for FaultCounts {
    fn add_assign(&mut self, other: Self) {
        self.faults += other.faults;
        self.reported += other.reported;
        self.survived += other.survived;
        self.corrupt += other.corrupt;
    }
}

impl std::fmt::Display for FaultCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { faults, reported, survived, corrupt } = self;
        write!(
            f,
            "{faults} faults, {reported} reported, {survived} survived, {corrupt} left corrupt data"
        )
    }
}

/// A workload that was done with a fault.
struct FaultAttempt {
    memory: Vec<Arc<MemoryDevice>>,
    devices: Vec<Arc<FaultDevice>>,
    kept: Vec<usize>,
    begun: usize,
    /// How many failures the engine reported that failed no call.
    survived: usize,
    /// The indexes of the steps that were refused and are allowed to be, or the error that ended
    /// the run.
    outcome: Result<Vec<usize>, Error>,
}

impl Inflicter<'_> {
    /// Runs the workload once for each fault at each request to each member.
    ///
    /// # Errors
    /// The first fault after which a rule of the table above does not hold.
    pub fn inflict(&self, workload: &Workload) -> Result<FaultCounts, String> {
        let ready = ReadyVolume::new(self.engine, &self.image, workload)?;
        let sound = self.attempt(&ready, workload, None)?;
        let refused = sound.outcome.map_err(|e| format!("without a fault: {e}"))?;
        let history = ReadyVolume::new(self.engine, &self.image, workload)?
            .history(workload, &refused)
            .map_err(|e| format!("without a fault: {e}"))?;
        let mut inflicted = FaultCounts::default();
        let most = if self.has_copies { 0 } else { workload.most_sharers() };
        for member in 0..self.image.len() {
            for (requests, fault) in
                KINDS.into_iter().filter(|&(_, fault)| can_bear(self.engine, workload, fault))
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

    /// Runs the workload once, with the fault `strike` if there is one.
    ///
    /// # Errors
    /// When the volume accepts changes after a commit that failed.
    fn attempt(
        &self,
        ready: &ReadyVolume,
        workload: &Workload,
        strike: Option<(usize, RequestKind, u64, Fault)>,
    ) -> Result<FaultAttempt, String> {
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
                let count = fs.survived.clone();
                // Dropping the volume may write too, and has no caller who could be told.
                drop(fs);
                survived = count.load(Ordering::Relaxed);
                done.map_err(|(_, error)| error)
            }
        };
        Ok(FaultAttempt { memory, devices, kept, begun, survived, outcome })
    }

    /// Whether writing may have ended in a thread of the engine: an engine that ends with writes
    /// has such threads, and it has reported something.
    fn may_have_ended(&self, attempt: &FaultAttempt) -> bool {
        self.engine.manners().ends_with_writes && attempt.survived > 0
    }

    fn judge(
        &self,
        attempt: FaultAttempt,
        history: &History,
        (member, requests, number, fault): (usize, RequestKind, u64, Fault),
        most_corrupt: usize,
    ) -> Result<FaultCounts, String> {
        let struck = attempt.devices[member].count(requests) > number;
        let must_be_told = requests != RequestKind::Reads && fault != Fault::Garbage;
        match &attempt.outcome {
            Ok(_) if struck && must_be_told && attempt.survived == 0 => {
                return Err("no operation reported the failure".into());
            }
            Err(error) if must_be_told && self.spares_members => {
                return Err(format!("it is not survived: {error}"));
            }
            Ok(_) | Err(Error::Io { .. }) => {}
            Err(Error::Corrupt(_)) if fault == Fault::Garbage => {}
            // A thread of the engine met it before, ended all writing, and told the cause.
            Err(error) if error.errno() == Errno::ROFS && self.may_have_ended(&attempt) => {}
            Err(error) => return Err(format!("it is reported as {error}")),
        }
        let found = enter(self.engine, &attempt.memory, false)?;
        let corrupt = found.corrupt();
        let may_be_corrupt = requests == RequestKind::Writes && fault == Fault::Garbage;
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
        Ok(FaultCounts { faults: usize::from(struck), reported, survived, corrupt })
    }
}

/// Checks that a volume whose commit failed refuses changes and `sync`.
fn require_refusal(fs: &dyn FileSystemMut) -> Result<(), String> {
    let new = NewFile { permissions: 0o600, uid: 0, gid: 0, umask: None, at: Timestamp::default() };
    let made = fs.create(EntryPlace { dir: fs.root(), name: b"refused" }, &new).map(drop);
    for (what, outcome) in [("a new file", made), ("a sync", fs.sync())] {
        if !matches!(outcome, Err(Error::Posix { errno: Errno::ROFS, .. })) {
            return Err(format!("after a commit that failed, {what} gives {outcome:?}"));
        }
    }
    Ok(())
}
