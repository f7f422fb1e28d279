//! A local stage that is given a secret.

use arrow::array::RecordBatch;
use flow_base::event::Event;
use flow_kind::{
    Body, Context, InputPort, Inputs, Kind, Operator, Out, OutputPort, Partition, Progress, Secret, Shape, StageError,
};
use serde::{Deserialize, Serialize};

use super::port;

pub struct Login;

/// Passes rows on, and shows that it was given a secret.
#[derive(Clone, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginSettings {
    /// The secret.
    password: Secret,
    /// A setting that may be shown.
    #[serde(default)]
    user: String,
    /// What the password has to be.
    #[serde(default)]
    length: usize,
    /// Fails with the password in its message.
    #[serde(default)]
    fail: bool,
}

struct LoginBody(LoginSettings, Context);

impl Kind for Login {
    const NAME: &'static str = "toy.login";
    const VERSION: u32 = 1;
    const INPUTS: &'static [InputPort] = &[InputPort::streamed("rows", "numbers")];
    const OUTPUTS: &'static [OutputPort] = &[OutputPort::new("rows", "numbers")];
    type Settings = LoginSettings;

    fn shape(settings: &LoginSettings, _: &Inputs) -> Result<Shape, StageError> {
        if settings.length > 0 && settings.password.reveal().len() != settings.length {
            let message = format!("`{}` has another length", settings.password.reveal());
            return Err(StageError::setting("password", message));
        }
        Ok(Shape::local(vec![port("rows")]))
    }

    fn open(settings: &LoginSettings, context: &Context) -> Result<Body, StageError> {
        Ok(Body::Local(Box::new(LoginBody(settings.clone(), context.clone()))))
    }
}

impl Operator for LoginBody {
    fn batch(&mut self, _: &str, _: &Partition, batch: RecordBatch, out: &mut Out) -> Result<(), StageError> {
        let LoginBody(settings, context) = self;
        let password = settings.password.reveal();
        context.report(serde_json::json!({"line": format!("sent {password}"), password: 1}));
        context.events.send(Event::warning(
            None,
            format!("{} logs in with {password}", settings.user),
        ));
        if settings.fail {
            return Err(StageError::failed(format!("{password} was refused")).with_help(format!("change {password}")));
        }
        out.send(0, batch);
        Ok(())
    }

    fn partition_complete(&mut self, _: &Partition, _: &mut Out) -> Result<Progress, StageError> {
        Ok(Progress::Done)
    }
}
