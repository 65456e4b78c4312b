//! Cuts the power in the middle of writes, in memory, and opens what could be left. Each state has
//! the file that was synced.

use std::error::Error;
use std::sync::Arc;

use offshoot::device::{CrashDevice, CrashPlan, MemoryDevice};
use offshoot::{CreateOptions, OpenOptions, Volume};

fn main() -> Result<(), Box<dyn Error>> {
    let medium = Arc::new(MemoryDevice::sparse(256 << 20));
    drop(Volume::create_on(vec![medium.clone()], &CreateOptions::new())?);

    let recorded = Arc::new(CrashDevice::new(medium));
    let writing = OpenOptions::new().write(true);
    let volume = writing.open_devices(vec![recorded.clone()])?;
    volume.write("/ledger", "paid 100\n")?;
    volume.sync_file("/ledger")?;
    recorded.mark("the ledger is durable");
    volume.write("/scratch", vec![7; 1 << 20])?;
    volume.sync()?;
    drop(volume);

    let (mut opened, mut promised) = (0, 0);
    for state in recorded.log().states(&CrashPlan { samples_per_epoch: 4, ..CrashPlan::default() })
    {
        let state = state?;
        let is_promised = state.marks_before_earliest_cut() > 0;
        let devices = state.devices.into_iter().map(|device| Arc::new(device) as _).collect();
        // Opening replays what was synced since the last commit.
        let volume = writing.open_devices(devices)?;
        if is_promised {
            assert_eq!(volume.read("/ledger")?, b"paid 100\n", "{}", state.description);
            promised += 1;
        }
        volume.write("/again", "writable\n")?;
        volume.sync()?;
        opened += 1;
    }
    println!("{opened} states open, {promised} of them must have the ledger and do");
    Ok(())
}
