//! Opens a volume and lists a directory: `open_and_list disk.img /etc`.

use std::error::Error;

use offshoot::Volume;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args_os().skip(1);
    let image = args.next().ok_or("usage: open_and_list IMAGE [DIRECTORY]")?;
    let directory = args.next().unwrap_or_else(|| "/".into());
    let volume = Volume::open(image)?;
    for entry in volume.read_dir(&directory)? {
        let entry = entry?;
        let attr = volume.files().attr(entry.file)?;
        println!("{:06o} {:>12} {}", attr.mode(), attr.size, entry.name.display());
    }
    Ok(())
}
