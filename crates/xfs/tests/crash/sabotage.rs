//! An explorer that finds nothing proves nothing: engines and devices that are broken on purpose
//! must be caught.
//!
//! | what is broken | what goes wrong |
//! |---|---|
//! | no flush before a record of the log | a file has a size without its data |
//! | no flush behind a record | what was synced is lost |
//! | a record is lost, or has the cycle of the round before | the same |
//! | a block does not go home | the tail of the log passes it, and it is old |

use std::io::{self, IoSlice};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use offshoot_device::{BlockDevice, Delegate};
use offshoot_testkit::crash::manners::EngineManners;
use offshoot_testkit::crash::{MemberDevices, OpenedVolume, TestedEngine};
use offshoot_vfs::Result;

use super::*;
use crate::engine::OurXfs;

/// What a device does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum XfsSabotage {
    NoFlushBeforeRecords,
    NoFlushBehindRecords,
    /// One block in so many does not go home.
    LostHome(usize),
    /// One record in so many is not written.
    LostRecord(usize),
    /// The cycle in the header of one record in so many is that of the round before.
    OldCycle(usize),
}

/// A device that is broken on purpose.
#[derive(Debug)]
struct SabotagedDevice {
    below: Arc<dyn BlockDevice>,
    sabotage: XfsSabotage,
    log: Range<u64>,
    /// Whether the log was written since the last flush.
    is_behind_record: AtomicBool,
    count: AtomicUsize,
}

impl SabotagedDevice {
    /// Whether it is the turn of a write that one in `every` is.
    fn is_turn(&self, every: usize) -> bool {
        self.count.fetch_add(1, Ordering::Relaxed) % every == every - 1
    }
}

impl Delegate for SabotagedDevice {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.below
    }

    fn write_at(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        /// Where a header of a record has its cycle.
        const CYCLE: Range<usize> = 4..8;
        let is_record = self.log.contains(&offset);
        if is_record {
            self.is_behind_record.store(true, Ordering::Relaxed);
        }
        match self.sabotage {
            XfsSabotage::LostHome(every) if !is_record && self.is_turn(every) => Ok(()),
            XfsSabotage::LostRecord(every) if is_record && self.is_turn(every) => Ok(()),
            XfsSabotage::OldCycle(every) if is_record && self.is_turn(every) => {
                let mut bytes = buf.to_vec();
                if let Some(Ok(cycle)) = bytes.get(CYCLE).map(<[u8; 4]>::try_from) {
                    let old = u32::from_be_bytes(cycle).wrapping_sub(1);
                    bytes[CYCLE].copy_from_slice(&old.to_be_bytes());
                }
                self.below.write_at(offset, &bytes)
            }
            _ => self.below.write_at(offset, buf),
        }
    }

    fn write_vectored_at(&self, offset: u64, bufs: &[IoSlice<'_>]) -> io::Result<()> {
        let bytes: Vec<u8> = bufs.iter().flat_map(|part| part.iter().copied()).collect();
        Delegate::write_at(self, offset, &bytes)
    }

    fn flush(&self) -> io::Result<()> {
        let is_behind_record = self.is_behind_record.swap(false, Ordering::Relaxed);
        let left_out = match self.sabotage {
            XfsSabotage::NoFlushBeforeRecords => !is_behind_record,
            XfsSabotage::NoFlushBehindRecords => is_behind_record,
            _ => false,
        };
        if left_out { Ok(()) } else { self.below.flush() }
    }
}

/// How often a workload has opened its volume when its steps begin: once, for the set-up.
const OPENED_BEFORE: usize = 1;

/// Our engine over a device that is broken while the steps of a workload run. Afterwards it is
/// sound, so what the explorer finds is what the steps have left.
struct SabotagedXfs {
    engine: OurXfs,
    sabotage: XfsSabotage,
    opened: AtomicUsize,
}

impl TestedEngine for SabotagedXfs {
    fn open(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        self.engine.open(devices)
    }

    fn open_writable(&self, devices: MemberDevices) -> Result<OpenedVolume> {
        if self.opened.fetch_add(1, Ordering::Relaxed) != OPENED_BEFORE {
            return self.engine.open_writable(devices);
        }
        let broken = |below| {
            Arc::new(SabotagedDevice {
                below,
                sabotage: self.sabotage,
                log: self.engine.log.clone(),
                is_behind_record: AtomicBool::default(),
                count: AtomicUsize::default(),
            }) as Arc<dyn BlockDevice>
        };
        self.engine.open_writable(devices.into_iter().map(broken).collect())
    }

    fn check(&self, devices: MemberDevices) -> Result<()> {
        self.engine.check(devices)
    }

    fn manners(&self) -> EngineManners {
        self.engine.manners()
    }

    fn bears_torn(&self, offset: u64, data: &[u8]) -> bool {
        self.engine.bears_torn(offset, data)
    }
}

/// Requires that the explorer finds a sabotage in a workload in which it finds nothing otherwise.
/// Returns what it says.
fn caught(tested: &XfsUnderTest, sabotage: XfsSabotage, steps: &str) -> String {
    let workload = &Workload::parse("broken", "", steps).expect("a workload");
    let (image, judge) = (vec![tested.image.clone()], None);
    let sound = StateExplorer { engine: &tested.engine, image, plan: plan(1), judge };
    sound.explore(workload).unwrap_or_else(|problem| panic!("{workload}: {problem}"));
    let opened = AtomicUsize::default();
    let engine = SabotagedXfs { engine: tested.engine.clone(), sabotage, opened };
    let image = vec![tested.image.clone()];
    let broken = StateExplorer { engine: &engine, image, plan: plan(1), judge };
    let problem = broken.explore(workload).expect_err("it is broken");
    println!("{sabotage:?}: {problem}");
    problem
}

#[test]
fn what_is_broken_is_found() {
    let Some(judges) = judges::require() else { return };
    let tested = XfsUnderTest::new(&judges, USUAL);
    let caught = |sabotage, steps| caught(&tested, sabotage, steps);
    let synced = "create a; write a 0+9000; fsync /a; rename a b; fsync /b";
    let problem = caught(XfsSabotage::NoFlushBehindRecords, synced);
    assert!(problem.contains("is lost"), "{problem}");
    let problem = caught(XfsSabotage::NoFlushBeforeRecords, synced);
    assert!(problem.contains("is of no moment"), "{problem}");
    for sabotage in [XfsSabotage::LostRecord(2), XfsSabotage::OldCycle(2)] {
        caught(sabotage, synced);
    }
    caught(XfsSabotage::LostHome(4), "mkdir A; create A/a; write A/a 0+9000; sync");
}
