//! Makes the volume in the repository again and replaces it: `cargo xtask fixture`.

use std::process::ExitCode;

use offshoot_testkit::btrfs::{fixture, judges};

fn main() -> ExitCode {
    let made = judges::require()
        .ok_or_else(|| "the kernel makes the volume, which takes root".to_owned())
        .and_then(|judges| fixture::make(&judges).map_err(|error| error.to_string()));
    match made {
        Ok(()) => println!("made {} and {}", fixture::VOLUME, fixture::MANIFEST),
        Err(reason) => {
            eprintln!("the fixture: {reason}");
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
